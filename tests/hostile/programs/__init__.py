# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a tenant may run to hurt others, each a file in C or Python that says the safe outcome below its licence."""

from tools.harness.hostile_programs import (
    compile_program,
    gpu_program,
    pretended_libcuda,
    second_library,
    static_library,
)

__all__ = ["compile_program", "gpu_program", "pretended_libcuda", "second_library", "static_library"]
