# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The few gRPC messages that naming needs, as protobuf classes.

Only the fields that are read are declared; the rest of a message is skipped, as protobuf has it. So one table serves
every version of an API whose numbers agree (CRI v1 and v1alpha2, podresources v1 and v1alpha1), and nothing has to be
generated when the product is built. Numbers: api.proto of k8s.io/cri-api and k8s.io/kubelet, containerd's api/services.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "gpuwarden"
_MAP = "map<string, string>"
_Field = descriptor_pb2.FieldDescriptorProto

# Message → its fields: number, name, and "string", _MAP, or the message that it is ("*" before it: any number of them).
_MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "Empty": (),
    # runtime.v1.RuntimeService
    "ContainerFilter": ((1, "id", "string"),),
    "ListContainersRequest": ((1, "filter", "ContainerFilter"),),
    "ListContainersResponse": ((1, "containers", "*CriContainer"),),
    "CriContainer": (
        (1, "id", "string"),
        (2, "pod_sandbox_id", "string"),
        (3, "metadata", "ContainerMetadata"),
        (4, "image", "ImageSpec"),
        (8, "labels", _MAP),
    ),
    "ContainerMetadata": ((1, "name", "string"),),
    "ImageSpec": ((1, "image", "string"),),
    "ContainerStatusRequest": ((1, "container_id", "string"),),
    "ContainerStatusResponse": ((1, "status", "ContainerStatus"),),
    "ContainerStatus": ((1, "id", "string"), (8, "image", "ImageSpec")),
    "PodSandboxFilter": ((1, "id", "string"),),
    "ListPodSandboxRequest": ((1, "filter", "PodSandboxFilter"),),
    "ListPodSandboxResponse": ((1, "items", "*PodSandbox"),),
    "PodSandbox": (
        (1, "id", "string"),
        (2, "metadata", "PodSandboxMetadata"),
        (5, "labels", _MAP),
        (6, "annotations", _MAP),
    ),
    "PodSandboxMetadata": ((1, "name", "string"), (2, "uid", "string"), (3, "namespace", "string")),
    # containerd.services.namespaces.v1.Namespaces, containerd.services.containers.v1.Containers
    "ListNamespacesResponse": ((1, "namespaces", "*Namespace"),),
    "Namespace": ((1, "name", "string"),),
    "GetContainerRequest": ((1, "id", "string"),),
    "GetContainerResponse": ((1, "container", "ContainerdContainer"),),
    "ContainerdContainer": ((1, "id", "string"), (2, "labels", _MAP), (3, "image", "string")),
    # v1.PodResourcesLister
    "ListPodResourcesResponse": ((1, "pod_resources", "*PodResources"),),
    "PodResources": ((1, "name", "string"), (2, "namespace", "string"), (3, "containers", "*ContainerResources")),
    "ContainerResources": ((1, "name", "string"), (2, "devices", "*ContainerDevices")),
    "ContainerDevices": ((1, "resource_name", "string"), (2, "device_ids", "*string")),
}


def _descriptor() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="gpuwarden.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            _add_field(message, number, field, kind)
    return file


def _add_field(message: Any, number: int, name: str, kind: str) -> None:
    """`message`: the DescriptorProto that is being made."""
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.startswith("*"):
        kind, field.label = kind[1:], _Field.LABEL_REPEATED
    if kind == "string":
        field.type = _Field.TYPE_STRING
        return
    if kind == _MAP:
        field.label = _Field.LABEL_REPEATED
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        for index, part in enumerate(("key", "value"), 1):
            entry.field.add(name=part, number=index, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        kind = f"{message.name}.{entry.name}"
    field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_descriptor())


def message(name: str) -> Any:
    """The class of that message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
