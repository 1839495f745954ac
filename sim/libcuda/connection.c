/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define ALIVE_CHECK_NS 100000000ull
#define HANDSHAKE_SECONDS 10

enum { CLOSED, OPENING, OPEN };

struct connection connection = {.socket = -1, .doorbell = -1};

static _Atomic int state;
static _Atomic bool forked, dead;
static _Atomic uint64_t checked_ns;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

/* The parent's ring is not the child's: the child must not even keep the socket open, or the server would miss a hang-up. */
static void after_fork_in_child(void)
{
	if (atomic_load(&state) == CLOSED)
		return;
	atomic_store(&forked, true);
	if (connection.socket >= 0)
		close(connection.socket);
	if (connection.doorbell >= 0)
		close(connection.doorbell);
	if (connection.shared)
		munmap(connection.shared, sizeof(struct shared));
	connection.socket = connection.doorbell = -1;
	connection.shared = NULL;
}

__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* As the driver's own end of a process: what is queued is given up in order. */
__attribute__((destructor)) static void leave(void)
{
	if (connection.shared)
		atomic_store(&connection.shared->leaving, 1);
}

/* ---- what the environment says ---- */

static void parse_pinned(const char *text, uint64_t bytes[MAX_DEVICES])
{
	while (text && *text) {
		char *end;
		unsigned long device = strtoul(text, &end, 10);
		uint64_t value;

		if (end == text || *end != '=')
			return;
		text = end + 1;
		value = strtoull(text, &end, 10);
		if (end == text)
			return;
		if (*end == 'G' || *end == 'g')
			value <<= 30, end++;
		else if (*end == 'M' || *end == 'm')
			value <<= 20, end++;
		else if (*end == 'K' || *end == 'k')
			value <<= 10, end++;
		if (*end == 'B' || *end == 'b')
			end++;
		if (device < MAX_DEVICES)
			bytes[device] = value;
		if (*end != ',')
			return;
		text = end + 1;
	}
}

static void fill_hello(struct hello *hello)
{
	const char *pipe_directory = getenv("CUDA_MPS_PIPE_DIRECTORY"),
		   *percentage = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
	const char *priority = getenv("CUDA_MPS_CLIENT_PRIORITY"), *graphics = getenv("GPUSIM_GRAPHICS");
	char path[PATH_MAX];

	*hello = (struct hello){
		.magic = GPUSIM_MAGIC, .version = GPUSIM_VERSION, .kind = HELLO_CUDA, .mps_priority = -1};
	snprintf(path, sizeof(path), "%s/control",
		 pipe_directory && *pipe_directory ? pipe_directory : "/tmp/nvidia-mps");
	hello->mps = access(path, F_OK) == 0;
	if (percentage && *percentage) {
		double value = strtod(percentage, NULL);

		hello->mps_percentage = value > 100 ? 100 : value > 0 && value < 1 ? 1 : value > 0 ? (int32_t)value : 0;
	}
	hello->graphics = !graphics || strcmp(graphics, "0") == 0 ? GRAPHICS_NONE
			  : strcmp(graphics, "both") == 0	  ? GRAPHICS_TOO
								  : GRAPHICS_ONLY;
	if (priority && *priority)
		hello->mps_priority = (int32_t)strtol(priority, NULL, 10);
	parse_pinned(getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), hello->mps_pinned_bytes);
}

/* ---- which devices the program sees ---- */

struct order {
	uint32_t gpus[MAX_GPUS];
	uint32_t count;
};

/* The order that plain numbers count in: the fastest first (the driver's default), or that of the bus. */
static void order_gpus(const struct welcome *welcome, struct order *order)
{
	const char *wanted = getenv("CUDA_DEVICE_ORDER");
	bool by_bus = wanted && strcasecmp(wanted, "PCI_BUS_ID") == 0;

	order->count = 0;
	for (uint32_t i = 0; i < welcome->devices && order->count < MAX_GPUS; i++) {
		uint32_t at = order->count++;

		if (welcome->facts[i].is_instance) {
			order->count--;
			continue;
		}
		while (!by_bus && at && welcome->facts[order->gpus[at - 1]].sms < welcome->facts[i].sms) {
			order->gpus[at] = order->gpus[at - 1];
			at--;
		}
		order->gpus[at] = i;
	}
}

/* What stands for a GPU: itself, or the first of its instances. -1: it is split into none. */
static int usable(const struct welcome *welcome, uint32_t gpu)
{
	int first = -1;

	if (!welcome->facts[gpu].mig_mode)
		return (int)gpu;
	for (uint32_t i = 0; i < welcome->devices; i++) {
		const struct device_facts *facts = &welcome->facts[i];

		if (facts->is_instance && facts->present && facts->gpu == gpu &&
		    (first < 0 || facts->position < welcome->facts[first].position))
			first = (int)i;
	}
	return first;
}

/* A GPU's UUID may be cut short while only one begins so, an instance's may not. */
static int find_uuid(const char *entry, const struct welcome *welcome)
{
	bool instance = strncasecmp(entry, "MIG-", 4) == 0;
	int found = -1;

	for (uint32_t i = 0; i < welcome->devices; i++) {
		const struct device_facts *facts = &welcome->facts[i];

		if (!facts->present || strncasecmp(facts->uuid, entry, strlen(entry)) != 0 ||
		    (instance && strlen(facts->uuid) != strlen(entry)))
			continue;
		if (found >= 0)
			return -1;
		found = (int)i;
	}
	return found;
}

/* "MIG-GPU-…/1/0", as drivers before 470 wrote it. */
static int find_numbered(const char *entry, const struct welcome *welcome)
{
	unsigned gpu_instance, compute_instance;
	char uuid[48];

	if (sscanf(entry, "MIG-%47[^/]/%u/%u", uuid, &gpu_instance, &compute_instance) != 3)
		return -1;
	for (uint32_t i = 0; i < welcome->devices; i++) {
		const struct device_facts *facts = &welcome->facts[i];

		if (facts->is_instance && facts->present && facts->gpu_instance == gpu_instance &&
		    facts->compute_instance == compute_instance &&
		    strcasecmp(welcome->facts[facts->gpu].uuid, uuid) == 0)
			return (int)i;
	}
	return -1;
}

static int find_visible(const char *entry, const struct welcome *welcome, const struct order *order)
{
	char *end;
	int found;
	unsigned long index;

	if (strncasecmp(entry, "MIG-GPU-", 8) == 0)
		return find_numbered(entry, welcome);
	if (strncasecmp(entry, "MIG-", 4) == 0)
		return find_uuid(entry, welcome);
	if (strncasecmp(entry, "GPU-", 4) == 0) {
		found = find_uuid(entry, welcome);
		return found < 0 ? -1 : usable(welcome, (uint32_t)found);
	}
	index = strtoul(entry, &end, 10);
	if (end == entry || *end || *entry == '-' || index >= order->count)
		return -1;
	return usable(welcome, order->gpus[index]);
}

static bool add_visible(int device)
{
	for (int i = 0; i < connection.devices; i++)
		if (connection.visible[i] == (uint32_t)device)
			return false;
	connection.visible[connection.devices++] = (uint32_t)device;
	return true;
}

/* A process sees one instance at most, and no whole GPU beside it. */
static void keep_first_instance(const struct welcome *welcome)
{
	for (int i = 0; i < connection.devices; i++)
		if (welcome->facts[connection.visible[i]].is_instance) {
			connection.visible[0] = connection.visible[i];
			connection.devices = 1;
		}
}

static void choose_visible(const struct welcome *welcome)
{
	const char *list = getenv("CUDA_VISIBLE_DEVICES");
	char copy[1024], *place = NULL;
	struct order order;

	order_gpus(welcome, &order);
	connection.devices = 0;
	for (uint32_t i = 0; !list && i < order.count; i++) {
		int device = usable(welcome, order.gpus[i]);

		if (device >= 0)
			add_visible(device);
	}
	snprintf(copy, sizeof(copy), "%s", list ? list : "");
	for (char *entry = strtok_r(copy, ", ", &place); entry; entry = strtok_r(NULL, ", ", &place)) {
		int device = find_visible(entry, welcome, &order);

		if (device < 0 || !add_visible(device))
			break;
	}
	keep_first_instance(welcome);
}

/* ---- handshake ---- */

static int dial(void)
{
	const char *directory = getenv("GPUSIM_DIR");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct timeval limit = {.tv_sec = HANDSHAKE_SECONDS};
	int length = snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s",
			      directory && *directory ? directory : GPUSIM_DEFAULT_DIR, GPUSIM_SOCKET);
	int fd;

	if (length < 0 || (size_t)length >= sizeof(address.sun_path))
		return -1;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

static void keep_descriptors(struct msghdr *message, int fds[2])
{
	for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header))
		if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
		    header->cmsg_len == CMSG_LEN(2 * sizeof(int)))
			memcpy(fds, CMSG_DATA(header), 2 * sizeof(int));
}

static bool receive_welcome(int fd, struct welcome *welcome, int fds[2])
{
	char control[CMSG_SPACE(2 * sizeof(int))];
	size_t have = 0;

	while (have < sizeof(*welcome)) {
		struct iovec part = {(char *)welcome + have, sizeof(*welcome) - have};
		struct msghdr message = {
			.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
		ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return false;
		keep_descriptors(&message, fds);
		have += (size_t)got;
	}
	return welcome->magic == GPUSIM_MAGIC && welcome->devices <= MAX_DEVICES && fds[0] >= 0 && fds[1] >= 0;
}

static bool shake_hands(int fd, int fds[2])
{
	struct hello hello;

	fill_hello(&hello);
	if (send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != (ssize_t)sizeof(hello) ||
	    !receive_welcome(fd, &connection.welcome, fds))
		return false;
	choose_visible(&connection.welcome);
	return connection.devices > 0;
}

static CUresult open_now(void)
{
	int fds[2] = {-1, -1}, fd = dial();
	struct shared *shared = MAP_FAILED;

	if (fd < 0)
		return CUDA_ERROR_NO_DEVICE;
	if (shake_hands(fd, fds))
		shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	if (fds[0] >= 0)
		close(fds[0]);
	if (shared == MAP_FAILED) {
		if (fds[1] >= 0)
			close(fds[1]);
		close(fd);
		return CUDA_ERROR_NO_DEVICE;
	}
	connection.socket = fd;
	connection.doorbell = fds[1];
	connection.shared = shared;
	return CUDA_SUCCESS;
}

CUresult connection_open(void)
{
	CUresult result;

	if (atomic_load(&forked))
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&opening);
	if (atomic_load(&state) == OPEN) {
		pthread_mutex_unlock(&opening);
		return ready();
	}
	atomic_store(&state, OPENING);
	result = open_now();
	atomic_store(&state, result == CUDA_SUCCESS ? OPEN : CLOSED);
	pthread_mutex_unlock(&opening);
	return result;
}

CUresult ready(void)
{
	CUresult result;

	if (atomic_load_explicit(&state, memory_order_acquire) != OPEN ||
	    atomic_load_explicit(&forked, memory_order_relaxed))
		return CUDA_ERROR_NOT_INITIALIZED;
	result = (CUresult)atomic_load_explicit(&connection.shared->gone, memory_order_relaxed);
	if (result == CUDA_SUCCESS && atomic_load_explicit(&dead, memory_order_relaxed))
		result = CUDA_ERROR_DEVICE_UNAVAILABLE;
	return result;
}

CUresult ready_ordinal(CUdevice device)
{
	CUresult result = ready();

	if (result == CUDA_SUCCESS && (device < 0 || device >= connection.devices))
		return CUDA_ERROR_INVALID_DEVICE;
	return result;
}

const struct device_facts *facts_of(CUdevice device)
{
	return &connection.welcome.facts[connection.visible[device]];
}

bool connection_alive(bool now)
{
	uint64_t at_ns = clock_ns();
	char byte;
	ssize_t got;

	if (atomic_load(&dead) || atomic_load(&connection.shared->gone))
		return false;
	if (!now && at_ns - atomic_load(&checked_ns) < ALIVE_CHECK_NS)
		return true;
	atomic_store(&checked_ns, at_ns);
	got = recv(connection.socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
	if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
		atomic_store(&dead, true);
	return !atomic_load(&dead);
}
