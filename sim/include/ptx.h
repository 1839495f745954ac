/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * How every module of PTX here begins. A driver compiles PTX for the GPU that it names and for all later ones: Turing is
 * the oldest that CUDA 13 still compiles for, and 6.3 (CUDA 10.0) the first version that knows Turing.
 */
#ifndef GPUWARDEN_PTX_H
#define GPUWARDEN_PTX_H

#define PTX_HEAD ".version 6.3\n.target sm_75\n.address_size 64\n"

#endif
