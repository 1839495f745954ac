/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * A library for LD_PRELOAD: the program has a context on the GPU through the node's own libcuda (DRIVER), so that NVML
 * lists it and its rule is enforced, whatever libcuda it calls itself.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>

__attribute__((constructor)) static void be_listed(void)
{
	void *driver = dlopen(getenv("DRIVER"), RTLD_NOW | RTLD_LOCAL); /* a path: not the one that is loaded already */
	CUresult (*init)(unsigned);
	CUresult (*create)(CUcontext *, unsigned, CUdevice);
	CUcontext context;

	if (!driver)
		abort();
	init = (CUresult(*)(unsigned))dlsym(driver, "cuInit");
	create = (CUresult(*)(CUcontext *, unsigned, CUdevice))dlsym(driver, "cuCtxCreate");
	if (!init || !create || init(0) || create(&context, 0, 0))
		abort();
}
