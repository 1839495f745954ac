/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The control program's command language (protocol 2). */
#pragma once

#include <stdbool.h>

/* Carries out one line and prints its answer. False when it failed; the reason is on standard output, as on the real
 * one. */
bool command_run(int server, char *line);

/* True after a quit that was carried out. */
bool command_quit(void);
