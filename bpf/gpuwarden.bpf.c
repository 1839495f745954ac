// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * One object out of all concerns, because they share maps and because a launch is counted and paced by one probe: on a
 * virtual machine a second probe on the same call costs as much as the first.
 */
#include "maps.bpf.h"

#include "context.bpf.c"
#include "copy.bpf.c"
#include "exit.bpf.c"
#include "graph.bpf.c"
#include "launch.bpf.c"
#include "mapping.bpf.c"
#include "memory.bpf.c"
#include "name.bpf.c"
#include "node.bpf.c"
#include "pace.bpf.c"
#include "pcie.bpf.c"
#include "quota.bpf.c"
#include "stream.bpf.c"
#include "turn.bpf.c"
#include "wait.bpf.c"

char LICENSE[] SEC("license") = "Dual BSD/GPL";
