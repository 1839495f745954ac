/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What one kernel makes of a quota: `guest FOLDER` loads the objects of FOLDER as the agent does, bounds a program that
 * allocates, and prints "deny: yes" or "deny: no", one line "OK …" or "FAILED …" per check, and "END".
 * `guest FOLDER LIBCUDA PLACE`: with NVIDIA's library, whose probes stand so many bytes into its functions. Without a GPU
 * it refuses each allocation in its own way.
 */
#define _GNU_SOURCE
#include "guest.h"
#include "quota.h"

#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
	MIB = 1 << 20,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	UPROBE_MULTI = 48,
	MULTI_RETURN = 1,
	THREADS = 4,
	ROUNDS = 200
};

static struct bpf_object *object;
static int victim_socket, multi = 1, failures;
static pid_t victim;
static int (*allocate)(unsigned long long *, size_t) = cuMemAlloc_v2;
static int (*release)(unsigned long long) = cuMemFree_v2;
static unsigned long place; /* of a probe: bytes from the function */

static void check(int holds, const char *what)
{
	printf("%s %s\n", holds ? "OK" : "FAILED", what);
	failures += !holds;
}

static void must(int holds, const char *what)
{
	if (holds)
		return;
	printf("FAILED %s\nEND\n", what);
	exit(1);
}

/* ---- the program that allocates, one command at a time ---- */

/* From ever deeper stacks, whose contents must survive. */
static int denied_at(int depth)
{
	volatile unsigned long long below[8] = {1, 2, 3, 4, 5, 6, 7, 8}, sum = 0;
	unsigned long long pointer = 77;
	int result = depth ? denied_at(depth - 1) : allocate(&pointer, 6 * MIB);

	for (int i = 0; i < 8; i++)
		sum += below[i];
	return sum == 36 && pointer == 77 ? result : -1;
}

static void *hammer(void *unused)
{
	long wrong = 0;

	(void)unused;
	for (int i = 0; i < ROUNDS; i++)
		wrong += denied_at(i % 10) != OUT_OF_MEMORY;
	return (void *)wrong;
}

static int hammer_all(void)
{
	pthread_t threads[THREADS];
	void *wrong;
	long all = 0;

	for (int i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, hammer, NULL);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(threads[i], &wrong);
		all += (long)wrong;
	}
	return (int)all;
}

static void allocate_on_command(int commands)
{
	unsigned long long pointer = 0;
	char command;
	int result = 0;

	while (read(commands, &command, 1) == 1) {
		if (command == 'a')
			result = allocate(&pointer, 6 * MIB);
		else if (command == 'f')
			result = release(pointer);
		else
			result = hammer_all();
		if (write(commands, &result, sizeof(result)) != sizeof(result))
			break;
	}
	_exit(0);
}

static void tell(char command)
{
	must(write(victim_socket, &command, 1) == 1, "the program takes commands");
}

static int answer(void)
{
	int result = -1;

	must(read(victim_socket, &result, sizeof(result)) == sizeof(result), "the program answers");
	return result;
}

static int ask(char command)
{
	tell(command);
	return answer();
}

/* ---- loading, as agent/probes/libcuda.py does ---- */

static int quiet(enum libbpf_print_level level, const char *format, va_list arguments)
{
	return level == LIBBPF_WARN ? vprintf(format, arguments) : 0;
}

static struct bpf_object *open_object(const char *folder, const char *name)
{
	char path[256];
	struct bpf_object *opened;

	snprintf(path, sizeof(path), "%s/%s.bpf.o", folder, name);
	opened = bpf_object__open_file(path, NULL);
	must(opened != NULL, path);
	return opened;
}

static int can_deny(const char *folder)
{
	struct bpf_object *probe = open_object(folder, "deny");
	int accepted;

	libbpf_set_print(NULL); /* a refusal is an answer */
	accepted = bpf_object__load(probe) == 0;
	libbpf_set_print(quiet);
	bpf_object__close(probe);
	return accepted;
}

struct multi_link { /* the part of union bpf_attr */
	__u32 prog_fd, target_fd, attach_type, flags;
	__u64 path, offsets, ref_ctr_offsets, cookies;
	__u32 count, multi_flags, pid, pad;
};

static int takes_multi(void)
{
	__u64 offset = 1;
	struct multi_link request = {
		.attach_type = UPROBE_MULTI, .path = (__u64) "/", .offsets = (__u64)&offset, .count = 1};

	request.prog_fd = bpf_program__fd(bpf_object__find_program_by_name(object, "memory_enter"));
	return syscall(SYS_bpf, BPF_LINK_CREATE, &request, sizeof(request)) < 0 && errno == EBADF;
}

static int try_load(const char *folder, int deny)
{
	struct bpf_program *program;

	object = open_object(folder, "gpuwarden");
	bpf_program__set_autoload(bpf_object__find_program_by_name(object, "memory_enter_or_deny"), deny);
	bpf_object__for_each_program(program,
				     object) if (multi && strncmp(bpf_program__section_name(program), "u", 1) == 0)
		bpf_program__set_expected_attach_type(program, (enum bpf_attach_type)UPROBE_MULTI);
	return bpf_object__load(object) == 0;
}

static void load(const char *folder, int deny)
{
	libbpf_set_print(NULL);
	if (try_load(folder, deny) && takes_multi())
		return;
	bpf_object__close(object);
	multi = 0;
	libbpf_set_print(quiet);
	must(try_load(folder, deny), "the agent's programs load");
}

static void attach(const char *name, void *function, __u64 cookie, int at_return)
{
	struct bpf_program *program = bpf_object__find_program_by_name(object, name);
	LIBBPF_OPTS(bpf_uprobe_opts, options, .retprobe = at_return, .bpf_cookie = cookie);
	struct multi_link request = {.attach_type = UPROBE_MULTI, .count = 1};
	__u64 offset;
	Dl_info where;

	must(program && dladdr(function, &where), name);
	offset = (char *)function - (char *)where.dli_fbase + place;
	if (!multi) {
		must(bpf_program__attach_uprobe_opts(program, -1, where.dli_fname, offset, &options) != NULL, name);
		return;
	}
	request.prog_fd = bpf_program__fd(program);
	request.path = (__u64)where.dli_fname;
	request.offsets = (__u64)&offset;
	request.cookies = (__u64)&cookie;
	request.multi_flags = at_return ? MULTI_RETURN : 0;
	must(syscall(SYS_bpf, BPF_LINK_CREATE, &request, sizeof(request)) >= 0, name);
}

static int map(const char *name)
{
	int fd = bpf_object__find_map_fd_by_name(object, name);

	must(fd >= 0, name);
	return fd;
}

static void put(const char *name, const void *key, const void *value)
{
	must(bpf_map_update_elem(map(name), key, value, BPF_ANY) == 0, name);
}

/* ---- what the agent and its guardian write ---- */

static void lease(__u64 until_ns)
{
	struct control control = {.lease_until_ns = until_ns};
	__u32 zero = 0;

	put("controls", &zero, &control);
}

static struct process_id identity(pid_t pid)
{
	struct process_id id = {.tgid = pid};
	char path[64], line[1024] = "", *field;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	file = fopen(path, "r");
	must(file && fgets(line, sizeof(line), file), path);
	fclose(file);
	field = strrchr(line, ')');
	for (int i = 0; field && i < 20; i++)
		field = strchr(field + 1, ' ');
	id.start_ticks = field ? strtoul(field, NULL, 10) : 0;
	return id;
}

static void bound(__u64 limit_bytes)
{
	struct process_id id = identity(victim);
	struct memory_rule rule = {.group = 1, .flags = QUOTA_DENY | QUOTA_HOLD, .max_hold_ns = 1ull << 40};
	struct quota_key key = {.group = 1};
	static struct quota quota;

	memset(rule.slots, SLOT_NONE, sizeof(rule.slots));
	quota.limit_bytes = limit_bytes;
	quota.count = 1;
	quota.members[0] = (struct memory_key){.process = id, .device = DEVICE_UNKNOWN};
	put("quotas", &key, &quota);
	put("memory_rules", &id, &rule);
}

static struct quota_use use(void)
{
	struct quota_key key = {.group = 1};
	struct quota_use found = {};

	bpf_map_lookup_elem(map("quota_uses"), &key, &found);
	return found;
}

/* ---- the checks ---- */

static void check_denial(void)
{
	check(ask('a') == OUT_OF_MEMORY && arrivals->entered == 1,
	      "an allocation that does not fit returns and never runs");
	check(use().denied == 1 && use().held == 0 && use().pending_bytes == 0, "it is counted, and charged no more");
	check(ask('h') == 0 && arrivals->entered == 1, "so does every one of several threads from any depth of stack");
	check(use().denied == 1 + THREADS * ROUNDS && use().pending_bytes == 0, "each of them is counted");
	check(ask('f') == 0 && ask('a') == 0 && arrivals->entered == 2, "what is freed can be allocated again");
	bound(13 * MIB);
	check(ask('a') == 0 && arrivals->entered == 3, "a quota that was raised counts at once");
}

static int is_stopped(void)
{
	int status = 0;

	return waitpid(victim, &status, WUNTRACED) == victim && WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP;
}

static void check_hold(void)
{
	tell('a');
	check(is_stopped() && arrivals->entered == 1,
	      "an allocation that does not fit stops its process before it runs");
	check(use().held == 1 && use().pending_bytes == 6 * MIB, "it is counted, and keeps its place");
	bound(13 * MIB);
	kill(victim, SIGCONT);
	check(answer() == 0 && arrivals->entered == 2, "once there is room it goes on");
	check(use().pending_bytes == 0, "and is charged no more");
}

static void start_victim(void)
{
	int ends[2];

	arrivals = mmap(NULL, sizeof(*arrivals), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(arrivals != MAP_FAILED && socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "memory and a socket");
	victim_socket = ends[0];
	victim = fork();
	if (victim == 0)
		allocate_on_command(ends[1]);
}

static void attach_all(int deny)
{
	__u64 alloc = 1 | ALLOC_POINTER_SIZE << 16, freed = 1 | FREE_POINTER << 16 | 1ull << 52;
	__s64 distance = 0;

	while (((unsigned char *)allocate)[place + distance] != 0xc3)
		distance++;
	put("returns", &alloc, &distance);
	attach("memory_alloc_return", allocate, alloc, 1);
	attach("memory_free_return", release, freed, 1);
	attach(deny ? "memory_enter_or_deny" : "memory_enter", allocate, alloc, 0);
	attach("memory_free_enter", release, freed, 0);
}

static void take_real_library(const char *path)
{
	void *library = dlopen(path, RTLD_NOW);

	must(library != NULL, "the library can be loaded");
	allocate = (int (*)(unsigned long long *, size_t))dlsym(library, "cuMemAlloc_v2");
	release = (int (*)(unsigned long long))dlsym(library, "cuMemFree_v2");
	must(allocate && release, "it allocates and frees");
}

static void check_real_library(void)
{
	check(ask('a') == NOT_INITIALIZED && use().denied == 0, "an allocation that fits runs");
	bound(1 * MIB);
	check(ask('a') == OUT_OF_MEMORY && use().denied == 1, "an allocation that does not fit is denied");
	check(ask('h') == 0 && use().denied == 1 + THREADS * ROUNDS, "so is every one of several threads");
	lease(0);
	check(ask('a') == NOT_INITIALIZED, "no process is denied or held once the lease is over");
}

static void check_counted_library(int deny)
{
	check(ask('a') == 0 && arrivals->entered == 1, "an allocation that fits runs");
	if (deny)
		check_denial();
	else
		check_hold();
	lease(0);
	check(ask('a') == 0, "no process is denied or held once the lease is over");
}

int main(int argc, char **argv)
{
	int deny, real = argc == 4;

	must(argc == 2 || real, "a folder is named");
	setbuf(stdout, NULL);
	if (real) {
		take_real_library(argv[2]);
		place = strtoul(argv[3], NULL, 10);
	}
	start_victim();
	deny = can_deny(argv[1]);
	load(argv[1], deny);
	printf("deny: %s\nlinks: %s\n", deny ? "yes" : "no", multi ? "multi" : "single");
	attach_all(deny);
	lease(~0ull);
	bound(10 * MIB);
	if (real)
		check_real_library();
	else
		check_counted_library(deny);
	kill(victim, SIGKILL);
	puts("END");
	return failures != 0;
}
