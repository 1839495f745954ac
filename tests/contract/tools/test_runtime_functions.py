# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The list of what a libcudart asks for, made of a library that asks as one does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.runtime_functions import asked_for

_LIBCUDART = """
#include <dlfcn.h>
#include <stddef.h>
typedef int (*get_1)(const char *, void **, int, unsigned long long);
typedef int (*get_2)(const char *, void **, int, unsigned long long, int *);
int cudaGetDeviceCount(int *count)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW), *function;
	int version, status, result = ((int (*)(int *))dlsym(library, "cuDriverGetVersion"))(&version);
	get_1 first = (get_1)dlsym(library, "cuGetProcAddress");
	get_2 second;

	*count = 0;
	if (first("", &function, 0, 0) || first("cuGetProcAddress", &function, 12000, 0))
		return 1;
	second = (get_2)function;
	second("cuMemFree", &function, 3020, 0, NULL);
	second("cuLaunchKernel", &function, 7000, 2, &status);
	second("cuLaunchKernel", &function, 4000, 0, &status);
	second("cuLaunchKernel", &function, 4000, 0, &status);
	return result || ((int (*)(void))function)() != 100;
}
"""


def test_each_function_version_and_stream_that_is_asked_for_is_listed_once(tmp_path: Path) -> None:
    libcudart = tmp_path / "libcudart.so.1"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(libcudart)]
    subprocess.run(command, input=_LIBCUDART, text=True, check=True)
    wanted = ["cuGetProcAddress 12000", "cuLaunchKernel 4000", "cuLaunchKernel 7000 per-thread", "cuMemFree 3020"]
    assert asked_for(libcudart) == wanted


def test_what_is_no_library_is_refused_with_the_loaders_words(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    with pytest.raises(ChildProcessError, match="cannot be loaded: OSError"):
        asked_for(tmp_path / "text")
