/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Whether a kernel takes every program: `guest FOLDER` loads the objects of FOLDER and prints for each "OK NAME", or
 * "FAILED NAME" with the end of what its verifier says, and "END".
 */
#include <bpf/libbpf.h>

#include <stdio.h>
#include <string.h>

enum { LOG_BYTES = 16 << 20, SHOWN = 1500 };

static char verifier_log[LOG_BYTES];

static int say_nothing(enum libbpf_print_level level, const char *format, va_list values)
{
	(void)level, (void)format, (void)values;
	return 0;
}

static void load(const char *folder, const char *name)
{
	LIBBPF_OPTS(bpf_object_open_opts, options, .kernel_log_buf = verifier_log, .kernel_log_size = LOG_BYTES,
		    .kernel_log_level = 1);
	struct bpf_object *object;
	char path[256];
	size_t said;

	snprintf(path, sizeof(path), "%s/%s.bpf.o", folder, name);
	object = bpf_object__open_file(path, &options);
	if (object && !bpf_object__load(object)) {
		printf("OK %s\n", name);
	} else {
		said = strlen(verifier_log);
		printf("FAILED %s\n%s\n", name, verifier_log + (said > SHOWN ? said - SHOWN : 0));
	}
	bpf_object__close(object);
}

int main(int argc, char **argv)
{
	static const char *const names[] = {"gpuwarden", "http", "stacks", "uprobe"};

	setbuf(stdout, NULL);
	libbpf_set_print(say_nothing);
	for (size_t i = 0; argc == 2 && i < sizeof(names) / sizeof(names[0]); i++)
		load(argv[1], names[i]);
	puts("END");
	return 0;
}
