# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The structs of bpf/*.h as ctypes, the proof that they are the same, and what their latency histogram says.

`check` compares size and every field's offset with the BTF of the object that was just loaded, so a header changed
without this file fails at start instead of reading rubbish.
"""

from __future__ import annotations

import ctypes as c
import math
from collections.abc import Mapping
from typing import Any

from agent.core.errors import ProbeError
from agent.core.model import ProcessId
from agent.probes.libbpf import BpfObject

U32, U64, S64 = c.c_uint32, c.c_uint64, c.c_int64
DEVICE_UNKNOWN = 0xFFFFFFFF
SLOTS, ORDINALS, SLOT_NONE = 16, 16, 0xFF
TRUSTED, TRUST_LOST, TRUST_LOST_IDLE, TRUST_MOST, HASTY_ALWAYS, ANNOUNCED_NS = 32, 16, 4, 64, 65536, 300_000  # of gates
QUEUES = SLOTS + 1
MEMORY_KINDS = ("plain", "managed", "pool", "virtual", "array", "graph", "pinned", "spare_7")
PINNED = MEMORY_KINDS.index("pinned")
COPY_DIRECTIONS = ("host_to_device", "device_to_host", "device_to_device", "unknown", "memset", "to_peer", "from_peer")
LATENCY_FIRST_POWER, LATENCY_SUB_BITS, LATENCY_POWERS = 10, 5, 30
LATENCY_BUCKETS = LATENCY_POWERS << LATENCY_SUB_BITS
DELIVERIES = 16
DELIVERED_FUNCTIONS = 8
SERVED = 16
LOST = (
    "launch_function",
    "launch",
    "process",
    "thread",
    "allocation",
    "memory",
    "copy",
    "call",
    "latency",
    "event",
    "user_read",
    "duplicate",
    "graph",
    "name",
    "batch",
    "quota",
    "node",
    "bounds",
    "ordinal",
    "charge",
    "context",
    "mapping",
    "context_memory",
    "new_graph",
    "graph_memory",
    "stream",
    "record",
    "uuid",
    "pace",
)
EVENT_PROCESS_SEEN, EVENT_PROCESS_EXIT, EVENT_GUARDIAN_EXIT, EVENT_PROCESS_EXEC = 1, 2, 3, 4
CGROUP_LEVELS, CGROUP_NAME, COMMAND_NAME, VISIBLE_DEVICES, LONGEST_NAME = 6, 96, 16, 384, 256
ENVIRONMENT_READ, ENVIRONMENT_VISIBLE, ENVIRONMENT_BUS_ORDER = 1, 2, 4
NAME_FUNCTION, NAME_ALIAS = 1, 2
ROLE_NONE, ROLE_ONLINE, ROLE_OFFLINE, ROLE_PERIODIC = 0, 1, 2, 3
RULE_PACE, RULE_GATE, RULE_BLOCKS, RULE_SOFT, RULE_COPIES, RULE_SHORT, RULE_INHERITED = 1, 2, 4, 8, 16, 32, 64
PAUSE_QUEUE, PAUSE_GATE, PAUSE_COPY, PAUSE_TURN = 1, 2, 3, 4
PAUSE_STOPPED, PAUSE_FREE, PAUSE_AGENT_EXIT, PAUSE_HELD, PAUSE_LINK_FREE = 1, 2, 3, 4, 5
LINK_DIRECTIONS, MOST_COPIERS, WEIGHT_ONE = 2, 16, 1000
LINKS = SLOTS * LINK_DIRECTIONS
LINK_LEAD_NS, LINK_QUEUE_NS, LINK_SETTLE_NS, LINK_LONGEST_NS = 2_000_000, 500_000, 50_000_000, 1_000_000_000
GROUP_ALL, MOST_MEMBERS = 0, 64
QUOTA_DENY, QUOTA_HOLD = 1, 2


class ProcessKey(c.Structure):
    """struct process_id."""

    _fields_ = [("tgid", U32), ("start_ticks", U32)]

    @classmethod
    def of(cls, process: ProcessId) -> ProcessKey:
        """The key of a process (its start time as the kernel side sees it: 32 bits)."""
        return cls(process.tgid, process.start_ticks & 0xFFFFFFFF)

    def id(self) -> ProcessId:
        """The process, as the rest of the product identifies it."""
        return ProcessId(self.tgid, self.start_ticks)


class Event(c.Structure):
    _fields_ = [("kind", U32), ("library", U32), ("process", ProcessKey), ("at_ns", U64)]


class CgroupPath(c.Structure):
    _fields_ = [("parts", (c.c_char * CGROUP_NAME) * CGROUP_LEVELS)]

    def text(self) -> str:
        """The path below the hierarchy's root; of one deeper than CGROUP_LEVELS, its last parts."""
        parts = [bytes(part.value).decode(errors="surrogateescape") for part in self.parts]
        return "/" + "/".join(part for part in reversed(parts) if part)


class Seen(c.Structure):
    _fields_ = [
        ("event", Event),
        ("uid", U32),
        ("environment", U32),
        ("command", c.c_char * COMMAND_NAME),
        ("visible", c.c_char * VISIBLE_DEVICES),
        ("unified", CgroupPath),
        ("legacy", CgroupPath),
    ]


class Name(c.Structure):
    _fields_ = [
        ("kind", U32),
        ("length", U32),
        ("process", ProcessKey),
        ("function", U64),
        ("other", U64),
        ("text", c.c_char * LONGEST_NAME),
    ]


class LaunchKey(c.Structure):
    _fields_ = [("process", ProcessKey), ("device", U32), ("_pad", U32), ("function", U64)]


class LaunchValue(c.Structure):
    _fields_ = [
        ("launches", U64),
        ("kernels", U64),
        ("blocks", U64),
        ("waves", U64),
        ("wave_sms", U64),
        ("last_ns", U64),
        ("threads_per_block", U32),
        ("_pad", U32),
    ]


class AllocationKey(c.Structure):
    _fields_ = [("process", ProcessKey), ("space", U32), ("_pad", U32), ("pointer", U64)]


class Allocation(c.Structure):
    _fields_ = [
        ("bytes", U64),
        ("at_ns", U64),
        ("context", U64),
        ("device", U32),
        ("kind", U32),
        ("references", U32),
        ("element_bytes", U32),
    ]


class ContextKey(c.Structure):
    _fields_ = [("process", ProcessKey), ("context", U64)]


class ContextMemory(c.Structure):
    _fields_ = [
        ("live_bytes", U64 * len(MEMORY_KINDS)),
        ("allocations", U64),
        ("ended_ns", U64),
        ("device_plus_1", U32),
        ("_pad", U32),
    ]


class MappingKey(c.Structure):
    _fields_ = [("process", ProcessKey), ("address", U64)]


class Mapped(c.Structure):
    _fields_ = [("bytes", U64), ("handle", U64), ("allocated_ns", U64), ("at_ns", U64)]


class MemoryKey(c.Structure):
    _fields_ = [("process", ProcessKey), ("device", U32), ("_pad", U32)]


class MemoryValue(c.Structure):
    _fields_ = [
        ("live_bytes", U64 * len(MEMORY_KINDS)),
        ("allocations", U64),
        ("frees", U64),
        ("failures", U64),
        ("peak_bytes", U64),
    ]


class CopyKey(c.Structure):
    _fields_ = [("process", ProcessKey), ("device", U32), ("direction", U32)]


class CopyValue(c.Structure):
    _fields_ = [("bytes", U64), ("calls", U64)]


class Latency(c.Structure):
    _fields_ = [("sum_ns", U64), ("count", U64), ("buckets", U32 * LATENCY_BUCKETS)]


class OrdinalKey(c.Structure):
    _fields_ = [("process", ProcessKey), ("ordinal", U32)]


class Uuid(c.Structure):
    _fields_ = [("bytes", c.c_uint8 * 16)]


class BusId(c.Structure):
    _fields_ = [("text", c.c_char * 24)]


class DeliveredFunction(c.Structure):
    _fields_ = [("function", U64), ("launches", U64)]


class Delivery(c.Structure):
    _fields_ = [
        ("at_ns", U64),
        ("launches", U64),
        ("charged_ns", U64),
        ("queued_ns", U64),
        ("waited_ns", U64),
        ("waited_busy_ns", U64),
        ("elapsed_ns", U64),
        ("elapsed_busy_ns", U64),
        ("pauses", U64),
        ("functions", DeliveredFunction * DELIVERED_FUNCTIONS),
    ]


class Deliveries(c.Structure):
    _fields_ = [("count", U64), ("ring", Delivery * DELIVERIES)]


class Rule(c.Structure):
    _fields_ = [
        ("role", U32),
        ("flags", U32),
        ("rate_ppm", U64),
        ("max_queued_ns", U64),
        ("launch_ns", U64),
        ("max_pause_ns", U64),
        ("floor_ppm", U64),
        ("deadline_ns", U64),
        ("slots", c.c_uint8 * ORDINALS),
        ("slot_unknown", U32),
        ("group", U32),
        ("weight", U32),
        ("_pad", U32),
    ]


class Payer(c.Structure):
    _fields_ = [("process", ProcessKey), ("seen_ns", U64), ("rule", Rule)]


class Queue(c.Structure):
    _fields_ = [
        ("queued_ns", U64),
        ("updated_ns", U64),
        ("busy_mark_ns", U64),
        ("backlog_ns", U64),
        ("held_ns", U64),
        ("held_for_ns", U64),
    ]


class Pace(c.Structure):
    _fields_ = [
        ("charged_ns", U64),
        ("pauses", U64),
        ("gate_pauses", U64),
        ("passes", U64),
        ("pass_left_ns", U64),
        ("foreign", U64),
        ("copy_pauses", U64),
        ("queues", Queue * QUEUES),
    ]


class Resume(c.Structure):
    _fields_ = [
        ("passes", U64),
        ("pass_ns", U64),
        ("stopped_at_ns", U64),
        ("paused_ns", U64),
        ("copy_paused_ns", U64),
        ("resumes", U64),
    ]


class Gate(c.Structure):
    _fields_ = [
        ("open", S64),
        ("in_wait", S64),
        ("busy_since_ns", U64),
        ("busy_total_ns", U64),
        ("last_online_ns", U64),
        ("last_free_ns", U64),
        ("waiting", U64),
        ("online_blocks", U64),
        ("stretch_since_ns", U64),
        ("free_posted", U64),
        ("requests", U64),
        ("served", S64),
        ("served_ns", U64),
        ("idle_ns", U64),
        ("trust", U64),
        ("hasty", U64),
    ]


class Copier(c.Structure):
    _fields_ = [
        ("group", U32),
        ("weight", U32),
        ("virtual_ns", U64),
        ("until_ns", U64),
        ("settled", U32),
        ("_pad", U32),
    ]


class Link(c.Structure):
    _fields_ = [
        ("bytes_per_second", U64),
        ("online_until_ns", U64),
        ("online_at_ns", U64),
        ("online_stream", U64),
        ("online_process", ProcessKey),
        ("virtual_ns", U64),
        ("queued_until_ns", U64),
        ("waiting", U64),
        ("free_posted", U64),
        ("copiers", Copier * MOST_COPIERS),
    ]


class Turn(c.Structure):
    _fields_ = [("owner", U64), ("since_ns", U64), ("until_ns", U64), ("waiting", U64)]


class Periodic(c.Structure):
    _fields_ = [
        ("requests", U64),
        ("misses", U64),
        ("worst_late_ns", U64),
        ("served", U64),
        ("served_ns", U64 * SERVED),
    ]


class Control(c.Structure):
    _fields_ = [
        ("lease_until_ns", U64),
        ("hold_ns", U64),
        ("heartbeat_ns", U64),
        ("rules", U64),
        ("wakes_lost", U64),
        ("agent_tgid", U32),
        ("guardian_tgid", U32),
    ]


class Wake(c.Structure):
    _fields_ = [("kind", U32), ("slot", U32), ("process", ProcessKey)]


class Pause(c.Structure):
    _fields_ = [
        ("kind", U32),
        ("reason", U32),
        ("process", ProcessKey),
        ("slot", U32),
        ("link", U32),
        ("at_ns", U64),
        ("ran_ns", U64),
        ("foreign_ns", U64),
        ("queued_ns", U64),
        ("estimate_ns", U64),
        ("charged_ns", U64),
        ("due_ns", U64),
        ("rule", Rule),
    ]


class MemoryRule(c.Structure):
    _fields_ = [
        ("group", U32),
        ("flags", U32),
        ("max_hold_ns", U64),
        ("slots", c.c_uint8 * ORDINALS),
        ("slot_unknown", U32),
        ("_pad", U32),
    ]


class QuotaKey(c.Structure):
    _fields_ = [("group", U32), ("slot", U32)]


class Quota(c.Structure):
    _fields_ = [
        ("limit_bytes", U64),
        ("other_bytes", U64),
        ("count", U32),
        ("_pad", U32),
        ("members", MemoryKey * MOST_MEMBERS),
    ]


class QuotaUse(c.Structure):
    _fields_ = [("pending_bytes", S64), ("denied", U64), ("held", U64), ("for_room", U64)]


class Held(c.Structure):
    _fields_ = [
        ("kind", U32),
        ("group", U32),
        ("process", ProcessKey),
        ("slot", U32),
        ("for_room", U32),
        ("at_ns", U64),
        ("bytes", U64),
        ("max_hold_ns", U64),
    ]


class Tenant(c.Structure):
    _fields_ = [("credit", S64 * len(LOST))]


class TenantLoss(c.Structure):
    _fields_ = [("lost", U64 * len(LOST))]


MAPS: dict[str, tuple[Any, Any]] = {
    "launches": (LaunchKey, LaunchValue),
    "other_launches": (LaunchKey, LaunchValue),
    "memory": (MemoryKey, MemoryValue),
    "allocations": (AllocationKey, Allocation),
    "context_memories": (ContextKey, ContextMemory),
    "mappings": (MappingKey, Mapped),
    "copies": (CopyKey, CopyValue),
    "latencies": (ProcessKey, Latency),
    "delivered": (ProcessKey, Deliveries),
    "uuids": (OrdinalKey, Uuid),
    "bus_ids": (OrdinalKey, BusId),
    "rules": (ProcessKey, Rule),
    "payers": (ProcessKey, Payer),
    "paces": (ProcessKey, Pace),
    "resumes": (ProcessKey, Resume),
    "stops": (ProcessKey, Pause),
    "holding": (ProcessKey, U64),
    "memory_rules": (ProcessKey, MemoryRule),
    "quotas": (QuotaKey, Quota),
    "quota_uses": (QuotaKey, QuotaUse),
    "returns": (U64, S64),
    "gates": (U32, Gate),
    "links": (U32, Link),
    "turns": (U32, Turn),
    "periodics": (ProcessKey, Periodic),
    "controls": (U32, Control),
    "lost": (U32, U64),
    "tenants": (U64, Tenant),
    "tenant_losses": (U64, TenantLoss),
    "newcomer": (U32, Tenant),
    "tenant_of": (ProcessKey, U64),
    "files": (U32, U64),
    "hits": (U32, U64),
    "sm_counts": (U32, U32),
}

_MIRRORS: dict[str, type[c.Structure]] = {
    "process_id": ProcessKey,
    "event": Event,
    "wake": Wake,
    "pause": Pause,
    "cgroup_path": CgroupPath,
    "seen": Seen,
    "name": Name,
    "ordinal_key": OrdinalKey,
    "uuid": Uuid,
    "bus_id": BusId,
    "delivered_function": DeliveredFunction,
    "launch_key": LaunchKey,
    "launch_value": LaunchValue,
    "allocation_key": AllocationKey,
    "allocation": Allocation,
    "context_key": ContextKey,
    "context_memory": ContextMemory,
    "mapping_key": MappingKey,
    "mapping": Mapped,
    "memory_key": MemoryKey,
    "memory_value": MemoryValue,
    "copy_key": CopyKey,
    "copy_value": CopyValue,
    "latency": Latency,
    "delivery": Delivery,
    "deliveries": Deliveries,
    "rule": Rule,
    "payer": Payer,
    "queue": Queue,
    "pace": Pace,
    "resume": Resume,
    "gate": Gate,
    "copier": Copier,
    "link": Link,
    "turn": Turn,
    "periodic": Periodic,
    "control": Control,
    "memory_rule": MemoryRule,
    "quota_key": QuotaKey,
    "quota": Quota,
    "quota_use": QuotaUse,
    "held": Held,
    "tenant": Tenant,
    "tenant_loss": TenantLoss,
}
_KIND_STRUCT = 4
_ROUNDING = 1e-9  # 0.07 × 100 is a little more than 7


class _BtfType(c.Structure):
    _fields_ = [("name", U32), ("info", U32), ("size", U32)]


class _BtfMember(c.Structure):
    _fields_ = [("name", U32), ("type", U32), ("offset_bits", U32)]


def check(bpf: BpfObject, mirrors: Mapping[str, type[c.Structure]] = _MIRRORS) -> None:
    """Raises ProbeError naming the first struct that differs from the object's BTF."""
    for name, mirror in mirrors.items():
        expected = _fields_in_btf(bpf, name)
        ours = {field[0]: getattr(mirror, field[0]).offset for field in mirror._fields_}
        if expected != (c.sizeof(mirror), ours):
            raise ProbeError(
                f"struct {name}: the BPF object has {expected}, agent/probes/abi.py {(c.sizeof(mirror), ours)}: "
                "rebuild with `make bpf`, or reinstall so that both come from one version"
            )


def size_of(bpf: BpfObject, name: str) -> int:
    """Bytes of a struct that only the kernel side reads."""
    return _fields_in_btf(bpf, name)[0]


def offset_of(bpf: BpfObject, name: str, field: str) -> int:
    """Where a field of such a struct is, in bytes."""
    return _fields_in_btf(bpf, name)[1][field]


def layout_of(bpf: BpfObject, name: str) -> list[Any]:
    """A struct's size and its fields with their offsets, as JSON has them: to see whether another object's is equal."""
    size, fields = _fields_in_btf(bpf, name)
    return [size, fields]


def _fields_in_btf(bpf: BpfObject, name: str) -> tuple[int, dict[str, int]]:
    lib, btf = bpf.lib, bpf.btf
    number = lib.btf__find_by_name_kind(btf, name.encode(), _KIND_STRUCT)
    if number < 0:
        raise ProbeError(f"the BPF object does not describe struct {name}: rebuild it with `make bpf`")
    address = lib.btf__type_by_id(btf, number)
    kind = _BtfType.from_address(address)
    members = (_BtfMember * (kind.info & 0xFFFF)).from_address(address + c.sizeof(_BtfType))
    names = ((lib.btf__name_by_offset(btf, member.name).decode(), member.offset_bits // 8) for member in members)
    return kind.size, dict(names)


def middle_ns(bucket: int) -> float:
    """The middle of a bucket of bpf/wait.h, in ns: 32 per power of two from 2^10, so a quantile is within 1.6 %.

    What is faster than a microsecond is in the first bucket, what takes longer than 18 minutes in the last.
    """
    power, sub = bucket >> LATENCY_SUB_BITS, bucket & ((1 << LATENCY_SUB_BITS) - 1)
    width = 2.0 ** (power + LATENCY_FIRST_POWER - LATENCY_SUB_BITS)
    return 2.0 ** (power + LATENCY_FIRST_POWER) + (sub + 0.5) * width


def quantile_ns(counts: Mapping[int, int], quantile: float) -> float | None:
    """The smallest latency that at least `quantile` of the requests did not exceed; None without requests.

    `counts`: bucket → requests.
    """
    wanted, seen = max(1, math.ceil(quantile * sum(counts.values()) - _ROUNDING)), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return middle_ns(bucket)
    return None


def slower(counts: Mapping[int, int], target_ns: int) -> int:
    """Requests that took longer than the target: more than 1 − quantile of all just where `quantile_ns` exceeds it."""
    return sum(count for bucket, count in counts.items() if middle_ns(bucket) > target_ns)
