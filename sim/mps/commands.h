/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The control program's command language (protocol 2). */
#pragma once

#include <stdbool.h>

/* Carries out one line and prints its answer, which is also where errors are: the exit code is 0, as of the real one. */
void command_run(int server, const char *line);

/* True after a quit that was carried out. */
bool command_quit(void);
