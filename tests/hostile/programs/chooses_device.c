/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Protected on device 1, where it works: a library that sets CUDA_VISIBLE_DEVICES before main, as many programs do
 * themselves, so that the environment which they were started with says otherwise.
 */
#include <stdlib.h>

__attribute__((constructor)) static void choose(void)
{
	setenv("CUDA_VISIBLE_DEVICES", "1", 1);
}
