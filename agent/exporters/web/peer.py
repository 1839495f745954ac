# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whose a client is, for limits: an address, or on loopback, where any process has millions of them, user and cgroup.

The kernel is asked for the other end's socket (sock_diag(7), inet_diag): its user, and from Linux 5.9 on its cgroup.
Where it may not be asked or does not answer, all of loopback is one client.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import ip_address
from typing import Final

LOOPBACK: Final = "loopback"
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_ALL_STATES: Final = 0xFFFFFFFF
_NO_COOKIE: Final = 0xFFFFFFFF
_CGROUP_ID: Final = 21  # INET_DIAG_CGROUP_ID
_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST: Final = struct.Struct("=BBBxI")  # inet_diag_req_v2 up to its socket
_SOCKET: Final = struct.Struct("=2s2s16s16sIII")  # inet_diag_sockid
_ANSWER: Final = struct.Struct("=BBBB48sIIIII")  # inet_diag_msg: …, uid, inode
_ATTRIBUTE: Final = struct.Struct("=HH")
_SECONDS: Final = 0.1
_MOST_BYTES: Final = 4096


def client_name(connection: socket.socket, address: tuple[str, int]) -> str:
    """What the limits of one client count together. `address`: of the other end."""
    known = ip_address(address[0].partition("%")[0])
    mapped = getattr(known, "ipv4_mapped", None)
    if not (mapped or known).is_loopback:
        return address[0]
    try:
        return f"{LOOPBACK} {_owner(connection)}"
    except (OSError, struct.error):
        return LOOPBACK


def _owner(connection: socket.socket) -> str:
    """User and cgroup of the process that has the other end."""
    peer, own = connection.getpeername(), connection.getsockname()
    ends = [socket.inet_pton(connection.family, str(end[0]).partition("%")[0]).ljust(16, b"\0") for end in (peer, own)]
    ports = [int(end[1]).to_bytes(2, "big") for end in (peer, own)]
    asked = _REQUEST.pack(connection.family, socket.IPPROTO_TCP, 0, _ALL_STATES)
    asked += _SOCKET.pack(*ports, *ends, 0, _NO_COOKIE, _NO_COOKIE)
    head = _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_SECONDS)
        kernel.send(head + asked)
        answer = kernel.recv(_MOST_BYTES)
    length, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        raise OSError("the kernel does not know the other end of a connection")
    uid = _ANSWER.unpack_from(answer, _HEADER.size)[-2]
    return f"{uid} {_cgroup(answer[_HEADER.size + _ANSWER.size : length])}"


def _cgroup(attributes: bytes) -> int:
    """0: not told."""
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _CGROUP_ID:
            return int.from_bytes(attributes[_ATTRIBUTE.size : length], "little")
        attributes = attributes[max(_ATTRIBUTE.size, (length + 3) & ~3) :]
    return 0
