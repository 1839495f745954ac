# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The tree of errors that the product raises on purpose.

WardenError            one line that says what to do; the command prints it without a traceback
├── UsageError         an option's value is invalid
├── SetupError         this machine lacks something (root, BTF, a library, a GPU)
├── ProbeError         a BPF object or a probe could not be loaded or attached
├── NvmlError          NVML refused a call that the agent cannot do without
├── MistakesError      a configuration file is wrong; carries every mistake, not just the first
│   ├── PolicyError    the policy
│   └── WebConfigError the web configuration
├── TrustError         other users could change a file that controls the agent
├── SourceError        a container runtime's socket failed, or its answer is invalid
│   └── SourceTimeoutError  it did not answer in time
└── GoneError          the process or device acted on no longer exists

EXIT_CODES is the table that --help prints and the documentation is made from.
"""

from typing import Final

EXIT_CODES: Final = (
    (0, "success"),
    (1, "failed, or only a part of it could be done: the message says what is left"),
    (2, "the command line, the policy or the web configuration is invalid"),
    (3, "this machine lacks something: root, a kernel feature, a library, a GPU, a running agent, a file"),
    (4, "a BPF program or a probe could not be loaded or attached"),
    (5, "NVML cannot be used"),
    (129, "gputop lost its terminal (SIGHUP)"),
    (130, "interrupted with Ctrl-C; gpuwarden run and gputop exit with 0 then"),
    (143, "gputop was terminated (SIGTERM); gpuwarden run exits with 0 then"),
)


def exit_codes() -> str:
    """The table as --help prints it."""
    return "exit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES)


class WardenError(Exception):
    """Base of all; `exit_code` is the exit code of the command that it ends."""

    exit_code = 1


class UsageError(WardenError):
    """The command line is invalid. The message says what to write."""

    exit_code = 2


class SetupError(WardenError):
    """The machine lacks something. The message names it and the remedy."""

    exit_code = 3


class ProbeError(WardenError):
    """A BPF program or probe could not be loaded or attached."""

    exit_code = 4


class NvmlError(WardenError):
    """NVML cannot be used at all (a single lost GPU is not this)."""

    exit_code = 5


class MistakesError(WardenError):
    """A configuration file is wrong. One message per mistake, in file order."""

    exit_code = 2

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PolicyError(MistakesError):
    """The policy is wrong."""


class WebConfigError(MistakesError):
    """The web configuration is wrong."""


class TrustError(WardenError):
    """Other users could change a file that controls the agent, or it is not regular. The message says what to do."""

    exit_code = 2


class SourceError(WardenError):
    """A container runtime's or the kubelet's socket failed or gave an invalid answer; it is retried later."""


class SourceTimeoutError(SourceError):
    """The socket did not answer in time."""


class GoneError(WardenError):
    """The process (tgid and start time) or device no longer exists."""
