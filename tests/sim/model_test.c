/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The model alone, driven with times of our choosing. `model_test` lists the tests, `model_test NAME` runs one of them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/model.h"

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                        \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)
#define CHECK_EQUAL(left, right)                                                                                       \
	do {                                                                                                           \
		uint64_t left_value = (uint64_t)(left), right_value = (uint64_t)(right);                               \
                                                                                                                       \
		if (left_value != right_value) {                                                                       \
			fprintf(stderr, "%s:%d: %s is %lu, not %s, which is %lu\n", __FILE__, __LINE__, #left,         \
				left_value, #right, right_value);                                                      \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

enum { MOST_CLIENTS = 8, CLIENT_STREAMS = 8 };

static const uint64_t US = 1000, MS = 1000000;

struct client {
	struct context *context;
	struct record *record;
	struct stream *streams[CLIENT_STREAMS];
	uint64_t submitted[CLIENT_STREAMS], completed[CLIENT_STREAMS];
	uint64_t marks[64];
};

static struct model *model;
static struct client clients[MOST_CLIENTS];
static uint32_t client_count;

static void on_completed(void *owner, uint32_t stream, uint64_t sequence)
{
	struct client *client = owner;

	CHECK(sequence > client->completed[stream]);
	CHECK(sequence <= client->submitted[stream]);
	client->completed[stream] = sequence;
}

static void on_mark(void *owner, uint32_t mark, uint64_t at_ns)
{
	((struct client *)owner)->marks[mark] = at_ns;
}

static void begin(struct config config)
{
	static const struct model_events EVENTS = {on_completed, on_mark};

	model = model_new(&config, &EVENTS);
}

static struct config shape(unsigned sms)
{
	return (struct config){.gpus = 1,
			       .sms = sms,
			       .memory_bytes = 1ull << 30,
			       .copy_bytes_per_second = 1000000000,
			       .dram_bytes_per_second = 100000000000,
			       .timeslice_ns = 2 * MS,
			       .switch_ns = 50 * US};
}

static struct client *join_as(unsigned device, bool mps, unsigned percentage, int priority)
{
	struct client *client = &clients[client_count++];

	client->record = record_new(model, device, client_count, mps, "test");
	client->context = context_new(model, device, client, client->record, mps, percentage, priority);
	for (uint32_t s = 0; s < CLIENT_STREAMS; s++)
		client->streams[s] = stream_new(client->context, s, 0);
	return client;
}

static struct client *join(void)
{
	return join_as(0, false, 0, 0);
}

static void submit(struct client *client, uint32_t stream, struct command command, struct stream *awaited)
{
	command.stream = stream;
	command.sequence = ++client->submitted[stream];
	command.at_ns = model_now(model);
	stream_submit(client->streams[stream], &command, awaited);
}

static void launch(struct client *client, uint32_t stream, uint64_t blocks, uint64_t ns)
{
	submit(client, stream, (struct command){.kind = CMD_KERNEL, .a = blocks, .b = 1024, .c = ns, .d = 1}, NULL);
}

static void copy(struct client *client, uint32_t stream, enum copy_kind kind, uint64_t bytes)
{
	submit(client, stream, (struct command){.kind = CMD_COPY, .a = kind, .b = bytes}, NULL);
}

static void mark(struct client *client, uint32_t stream, uint64_t number)
{
	submit(client, stream, (struct command){.kind = CMD_MARK, .a = number}, NULL);
}

static void wait_for(struct client *client, uint32_t stream, struct client *other, uint32_t other_stream)
{
	submit(client, stream,
	       (struct command){.kind = CMD_WAIT, .a = other_stream, .b = other->submitted[other_stream]},
	       other->streams[other_stream]);
}

static void run_all(void)
{
	while (model_next(model) != UINT64_MAX)
		model_step(model, UINT64_MAX);
}

static uint64_t sm_time(struct client *client)
{
	record_read(model, client->record);
	return client->record->sm_ns;
}

/* The first context that runs pays a switch; tests that count from zero get it out of the way. */
static void warm(struct client *client)
{
	launch(client, 0, 1, 1);
	run_all();
}

static void one_wave_takes_the_time_of_a_block(void)
{
	struct client *client;
	uint64_t start;

	begin(shape(10));
	client = join();
	warm(client);
	start = model_now(model);
	launch(client, 0, 20, 3 * MS); /* two blocks of 1,024 threads per SM */
	mark(client, 0, 1);
	run_all();
	CHECK_EQUAL(client->marks[1] - start, 3 * MS);
	CHECK_EQUAL(sm_time(client), 10 * 3 * MS + 1);
}

static void the_bit_beyond_a_wave_has_its_sms_to_itself(void)
{
	struct client *client;
	uint64_t start;

	begin(shape(10));
	client = join();
	warm(client);
	start = model_now(model);
	launch(client, 0, 23, 3 * MS); /* a full wave, then three SMs with one block each, which runs twice as fast */
	mark(client, 0, 1);
	run_all();
	CHECK_EQUAL(client->marks[1] - start, 3 * MS + 3 * MS / 2);
	CHECK_EQUAL(sm_time(client), 23 * 3 * MS / 2 + 1);
}

static void a_stream_is_a_queue(void)
{
	struct client *client;
	uint64_t start;

	begin(shape(10));
	client = join();
	warm(client);
	start = model_now(model);
	for (uint64_t i = 0; i < 5; i++) {
		launch(client, 0, 1, MS);
		mark(client, 0, i);
	}
	run_all();
	for (uint64_t i = 0; i < 5; i++)
		CHECK_EQUAL(client->marks[i] - start, (i + 1) * MS);
}

static void streams_of_a_context_overlap(void)
{
	struct client *client;
	uint64_t start;

	begin(shape(10));
	client = join();
	warm(client);
	start = model_now(model);
	launch(client, 0, 8, MS); /* four SMs would do, but blocks spread over free SMs: eight */
	launch(client, 1, 2, MS);
	launch(client, 2, 1, MS);
	for (uint32_t s = 0; s < 3; s++)
		mark(client, s, s);
	run_all();
	CHECK_EQUAL(client->marks[0] - start, MS);
	CHECK_EQUAL(client->marks[1] - start, MS);
	CHECK_EQUAL(client->marks[2] - start, 2 * MS);
}

static void a_launch_counts_from_its_own_time_however_late_it_is_taken(void)
{
	struct client *client;
	uint64_t start;

	begin(shape(10));
	client = join();
	warm(client);
	start = model_now(model) + 7 * MS;
	model_advance(model, start);
	launch(client, 0, 1, MS);
	model_advance(model, start + 20 * MS);
	mark(client, 0, 1);
	CHECK_EQUAL(client->completed[0], client->submitted[0]);
	CHECK_EQUAL(client->record->truth.busy_ns, MS + 1);
	CHECK_EQUAL(client->record->sm_ns, MS + 1);
}

static void contexts_take_turns(void)
{
	struct client *a, *b;
	uint64_t half;

	begin(shape(10));
	a = join();
	b = join();
	for (int i = 0; i < 400; i++) {
		launch(a, 0, 20, 100 * US);
		launch(b, 0, 20, 100 * US);
	}
	model_advance(model, 41 * MS);
	half = 10 * 20 * MS;
	CHECK(sm_time(a) > half * 9 / 10 && sm_time(a) <= half + 20 * MS);
	CHECK(sm_time(b) > half * 9 / 10 && sm_time(b) <= half + 20 * MS);
	run_all();
	CHECK_EQUAL(sm_time(a), 400 * 10 * 100 * US);
	CHECK_EQUAL(sm_time(b), 400 * 10 * 100 * US);
}

static void three_contexts_take_turns_in_a_ring(void)
{
	struct client *all[3];
	uint64_t most = 0, least = UINT64_MAX;

	begin(shape(10));
	for (int c = 0; c < 3; c++)
		all[c] = join();
	for (int i = 0; i < 1000; i++)
		for (int c = 0; c < 3; c++)
			launch(all[c], 0, 20, 100 * US);
	model_advance(model, 100 * MS);
	for (int c = 0; c < 3; c++) {
		most = sm_time(all[c]) > most ? sm_time(all[c]) : most;
		least = sm_time(all[c]) < least ? sm_time(all[c]) : least;
	}
	CHECK(most - least <= 10 * 2 * MS + 10 * 100 * US);
	CHECK(least > 0);
}

static void a_context_without_work_gives_way_at_once(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join();
	b = join();
	warm(a);
	start = model_now(model);
	launch(a, 0, 20, 100 * US);
	launch(b, 0, 20, 100 * US);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(b->marks[1] - start, 100 * US + 50 * US + 100 * US);
}

static void what_runs_stops_at_the_end_of_a_slice_and_goes_on_in_the_next(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join();
	b = join();
	warm(a);
	start = model_now(model);
	launch(a, 0, 20, 30 * MS);
	launch(b, 0, 20, MS);
	mark(a, 0, 1);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(b->marks[1] - start,
		    2 * MS - 1 + 50 * US + MS); /* warming took the first nanosecond of the slice */
	CHECK_EQUAL(a->marks[1] - start, 30 * MS + 50 * US + MS + 50 * US);
	CHECK_EQUAL(sm_time(a), 10 * 30 * MS + 1);
}

static void turns_are_equal_however_long_the_kernels_are(void)
{
	struct client *a, *b;
	uint64_t each = 10 * 50 * 2 * MS; /* of 205 ms, 50 slices */

	begin(shape(10));
	a = join();
	b = join();
	for (int i = 0; i < 50; i++)
		launch(a, 0, 20, 5 * MS);
	for (int i = 0; i < 1000; i++)
		launch(b, 0, 20, 200 * US);
	model_advance(model, 205 * MS);
	CHECK_EQUAL(sm_time(a), each);
	CHECK_EQUAL(sm_time(b), each);
}

static void a_newcomer_waits_for_the_rest_of_the_slice_of_one_that_was_alone(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join();
	b = join();
	launch(a, 0, 20, 100 * MS);
	start = 50 * US; /* of the first slice */
	model_advance(model, start + 7 * MS); /* in the middle of the fourth one */
	launch(b, 0, 20, MS);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(b->marks[1] - start, 8 * MS + 50 * US + MS);
}

static void a_context_that_ends_between_its_turns_finishes_in_them(void)
{
	struct device_state state;
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join();
	b = join();
	warm(a);
	start = model_now(model);
	launch(a, 0, 20, 10 * MS);
	launch(b, 0, 20, 3 * MS);
	mark(b, 0, 1);
	model_advance(model, start + 3 * MS); /* b runs */
	CHECK_EQUAL(sm_time(a), 10 * (2 * MS - 1) + 1);
	context_end(a->context);
	CHECK_EQUAL(a->completed[0], a->submitted[0]);
	run_all();
	CHECK_EQUAL(b->marks[1] - start, 2 * MS - 1 + 50 * US + 2 * MS + 50 * US + 2 * MS + 50 * US + MS);
	CHECK_EQUAL(sm_time(a), 10 * 10 * MS + 1);
	context_end(b->context);
	CHECK(device_idle(model, 0));
	device_read(model, 0, &state);
	CHECK_EQUAL(state.sm_active_ns * 10, sm_time(a) + sm_time(b) - 1);
}

static void a_stream_that_is_destroyed_between_turns_finishes_its_work(void)
{
	struct client *a, *b;

	begin(shape(10));
	a = join();
	b = join();
	launch(a, 1, 20, 5 * MS);
	launch(a, 1, 20, 5 * MS);
	launch(b, 0, 20, 5 * MS);
	model_advance(model, 3 * MS);
	stream_end(a->streams[1]);
	run_all();
	CHECK_EQUAL(a->completed[1], 2);
	CHECK_EQUAL(sm_time(a), 10 * 10 * MS);
	CHECK_EQUAL(sm_time(b), 10 * 5 * MS);
}

static void under_mps_contexts_share_the_sms(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join_as(0, true, 100, 0);
	b = join_as(0, true, 100, 0);
	warm(a);
	start = model_now(model);
	launch(a, 0, 4, MS);
	launch(b, 0, 4, MS);
	mark(a, 0, 1);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(a->marks[1] - start, MS);
	CHECK_EQUAL(b->marks[1] - start, MS);
}

static void a_percentage_caps_the_sms_held_and_rounds_up(void)
{
	struct client *a;
	uint64_t start;

	begin(shape(10));
	a = join_as(0, true, 25, 0);
	warm(a);
	start = model_now(model);
	launch(a, 0, 20, MS); /* twenty halves of a millisecond on three SMs: 7 + 7 + 6 */
	mark(a, 0, 1);
	run_all();
	CHECK_EQUAL(a->marks[1] - start, 7 * MS / 2);
}

static void a_capped_client_does_not_block_those_behind_it(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join_as(0, true, 50, 0);
	b = join_as(0, true, 100, 0);
	warm(a);
	start = model_now(model);
	launch(a, 0, 40, MS);
	launch(b, 0, 5, MS);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(b->marks[1] - start, MS);
}

static void left_over_sms_go_to_the_next_kernel(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join_as(0, true, 100, 0);
	b = join_as(0, true, 100, 0);
	warm(a);
	start = model_now(model);
	launch(a, 0, 23, MS); /* ten SMs, then three for half as long */
	launch(b, 0, 7, MS);
	mark(a, 0, 1);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(a->marks[1] - start, 3 * MS / 2);
	CHECK_EQUAL(b->marks[1] - start, 2 * MS);
}

static void an_sm_finishes_the_blocks_that_came_first(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join_as(0, true, 100, 0);
	b = join_as(0, true, 100, 0);
	warm(a);
	start = model_now(model);
	launch(a, 0, 8, 5 * MS); /* half of the threads of eight SMs */
	launch(b, 0, 12,
	       MS); /* one on each of the idle SMs, then one on each SM: ten, and two for which they end first */
	mark(a, 0, 1);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(a->marks[1] - start, 5 * MS);
	CHECK_EQUAL(b->marks[1] - start, 5 * MS + MS / 2);
}

static void blocks_wait_only_for_those_on_their_own_sm(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join_as(0, true, 100, 0);
	b = join_as(0, true, 30, 0);
	warm(a);
	start = model_now(model);
	launch(b, 0, 6, 5 * MS); /* one on each of three SMs, and then the other three */
	launch(a, 0, 14, MS); /* two on each of the other seven */
	mark(a, 0, 1);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(a->marks[1] - start, MS);
	CHECK_EQUAL(b->marks[1] - start, 10 * MS);
}

static uint64_t normal_beside_below_normal_ns(struct config config)
{
	struct client *low, *high;
	uint64_t start;

	begin(config);
	low = join_as(0, true, 100, 1);
	high = join_as(0, true, 100, 0);
	warm(low);
	start = model_now(model);
	launch(low, 0, 100, MS); /* five waves */
	launch(high, 0, 20, MS);
	mark(high, 0, 1);
	run_all();
	return high->marks[1] - start;
}

static void a_client_below_normal_waits_for_none(void)
{
	CHECK_EQUAL(normal_beside_below_normal_ns(shape(10)), 6 * MS);
}

static void where_priority_counts_normal_clients_get_the_first_free_slots(void)
{
	struct config config = shape(10);

	config.mps_priority = true;
	CHECK_EQUAL(normal_beside_below_normal_ns(config), 2 * MS);
}

static void an_urgent_stream_goes_before_an_older_one(void)
{
	struct client *client;
	uint64_t start;

	begin(shape(10));
	client = join();
	stream_end(client->streams[1]);
	client->streams[1] = stream_new(client->context, 1, -5);
	warm(client);
	start = model_now(model);
	launch(client, 0, 100, MS);
	launch(client, 2, 20, MS);
	launch(client, 1, 20, MS);
	mark(client, 1, 1);
	mark(client, 2, 2);
	run_all();
	CHECK_EQUAL(client->marks[1] - start, 2 * MS);
	CHECK_EQUAL(client->marks[2] - start, 7 * MS);
}

static void an_mps_group_and_a_context_of_its_own_take_turns(void)
{
	struct client *a, *b, *alone;

	begin(shape(10));
	a = join_as(0, true, 100, 0);
	b = join_as(0, true, 100, 0);
	alone = join();
	for (int i = 0; i < 300; i++) {
		launch(a, 0, 10, 100 * US);
		launch(b, 0, 10, 100 * US);
		launch(alone, 0, 20, 100 * US);
	}
	model_advance(model, 40 * MS);
	CHECK(sm_time(alone) > 10 * 18 * MS && sm_time(alone) < 10 * 21 * MS);
	CHECK(sm_time(a) + sm_time(b) > 10 * 18 * MS && sm_time(a) + sm_time(b) < 10 * 21 * MS);
}

static void copies_share_one_link_in_each_direction_beside_kernels(void)
{
	struct client *client;
	uint64_t start, each = 2 * US + MS; /* 1 GB/s */

	begin(shape(10));
	client = join();
	warm(client);
	start = model_now(model);
	copy(client, 0, COPY_H2D, 1000000);
	copy(client, 1, COPY_H2D, 1000000);
	copy(client, 2, COPY_D2H, 1000000);
	launch(client, 3, 20, 5 * MS);
	for (uint32_t s = 0; s < 4; s++)
		mark(client, s, s);
	run_all();
	CHECK_EQUAL(client->marks[0] - start, 2 * each);
	CHECK_EQUAL(client->marks[1] - start, 2 * each);
	CHECK_EQUAL(client->marks[2] - start, each);
	CHECK_EQUAL(client->marks[3] - start, 5 * MS);
	CHECK_EQUAL(client->record->truth.rx_bytes, 2000000);
	CHECK_EQUAL(client->record->truth.tx_bytes, 1000000);
}

static void a_copy_gets_its_part_of_the_link_from_the_moment_it_begins(void)
{
	struct client *client;
	uint64_t start;

	begin(shape(10));
	client = join();
	warm(client);
	start = model_now(model);
	copy(client, 0, COPY_H2D, 10000000);
	mark(client, 0, 0);
	model_advance(model, start + 4 * MS);
	copy(client, 1, COPY_H2D, 1000000);
	mark(client, 1, 1);
	run_all();
	CHECK_EQUAL(client->marks[1] - start, 4 * MS + 2 * (2 * US + MS));
	CHECK_EQUAL(client->marks[0] - start, 2 * (2 * US) + 11 * MS);
	CHECK_EQUAL(client->record->truth.rx_bytes, 11000000);
}

static void copies_wait_for_each_other_where_few_are_let_onto_the_link(void)
{
	struct config config = shape(10);
	uint64_t start, each = 2 * US + MS;
	struct client *client;

	config.copies_at_once = 1;
	begin(config);
	client = join();
	warm(client);
	start = model_now(model);
	copy(client, 0, COPY_H2D, 1000000);
	copy(client, 1, COPY_H2D, 1000000);
	copy(client, 2, COPY_D2H, 1000000);
	for (uint32_t s = 0; s < 3; s++)
		mark(client, s, s);
	run_all();
	CHECK_EQUAL(client->marks[0] - start, each);
	CHECK_EQUAL(client->marks[1] - start, 2 * each);
	CHECK_EQUAL(client->marks[2] - start, each);
}

static void copies_within_the_device_take_sms_and_turns(void)
{
	uint64_t each = 2 * US + MS; /* 100 GB/s */
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join();
	b = join();
	warm(a);
	start = model_now(model);
	launch(a, 0, 20, 30 * MS);
	copy(b, 0, COPY_D2D, 100000000);
	copy(b, 0, COPY_SET, 1); /* one SM */
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(b->marks[1] - start, 2 * MS - 1 + 50 * US + each + 2 * US);
	CHECK_EQUAL(sm_time(b), 10 * each + 2 * US);
	CHECK_EQUAL(b->record->truth.kernels, 0);
	CHECK_EQUAL(b->record->truth.rx_bytes + b->record->truth.tx_bytes, 0);
}

static void a_context_that_ends_leaves_no_copy_that_waits_for_sms(void)
{
	struct client *a, *b;

	begin(shape(10));
	a = join_as(0, true, 100, 0);
	b = join_as(0, true, 100, 0);
	launch(a, 0, 5, 3 * MS);
	copy(b, 0, COPY_D2D, 100000000); /* on five SMs, and then on the same again */
	model_advance(model, MS / 2);
	context_end(b->context);
	run_all();
	CHECK_EQUAL(b->completed[0], b->submitted[0]);
	CHECK_EQUAL(sm_time(b), 5 * (2 * US + MS));
	context_end(a->context);
	CHECK(device_idle(model, 0));
}

static void a_wait_holds_a_stream_until_the_other_gets_there(void)
{
	struct client *client;
	uint64_t start;

	begin(shape(10));
	client = join();
	warm(client);
	start = model_now(model);
	launch(client, 0, 1, 4 * MS);
	wait_for(client, 1, client, 0);
	launch(client, 1, 1, MS);
	mark(client, 1, 1);
	run_all();
	CHECK_EQUAL(client->marks[1] - start, 5 * MS);
}

static void a_wait_reaches_across_devices(void)
{
	struct config config = shape(10);
	struct client *client;
	struct record *there;
	uint64_t start;

	config.gpus = 2;
	begin(config);
	client = join();
	warm(client);
	/* stream 1 of the same process is on the other device */
	there = record_new(model, 1, 1, false, "test");
	stream_end(client->streams[1]);
	client->streams[1] = stream_new(context_new(model, 1, client, there, false, 0, 0), 1, 0);
	start = model_now(model);
	launch(client, 0, 1, 4 * MS);
	wait_for(client, 1, client, 0);
	launch(client, 1, 1, MS);
	mark(client, 1, 1);
	run_all();
	CHECK_EQUAL(client->marks[1] - start, 4 * MS + 50 * US + MS);
	context_end(stream_context(client->streams[1]));
}

static void a_wait_for_what_is_gone_ends(void)
{
	struct client *a;

	begin(shape(10));
	a = join();
	warm(a);
	submit(a, 1, (struct command){.kind = CMD_WAIT, .a = 0, .b = 1000000}, a->streams[0]);
	launch(a, 1, 1, MS);
	run_all();
	CHECK(a->completed[1] < a->submitted[1]);
	stream_end(a->streams[0]);
	run_all();
	CHECK_EQUAL(a->completed[1], a->submitted[1]);
}

static void a_dead_client_s_blocks_finish_and_its_queue_vanishes(void)
{
	struct client *a, *b;
	uint64_t start;

	begin(shape(10));
	a = join();
	b = join();
	warm(a);
	start = model_now(model);
	for (int i = 0; i < 50; i++)
		launch(a, 0, 20, 10 * MS);
	copy(a, 1, COPY_H2D, 1000000);
	copy(a, 2, COPY_H2D, 1000000);
	model_advance(model, start + MS / 2);
	context_end(a->context);
	launch(b, 0, 20, MS);
	mark(b, 0, 1);
	run_all();
	CHECK_EQUAL(b->marks[1] - start, 2 * MS - 1 + 50 * US + MS);
	CHECK_EQUAL(sm_time(a), 10 * 10 * MS + 1);
	CHECK_EQUAL(a->completed[0], a->submitted[0]); /* no request is left waiting */
}

static void a_destroyed_stream_finishes_its_work(void)
{
	struct client *a;

	begin(shape(10));
	a = join();
	warm(a);
	launch(a, 1, 20, MS);
	launch(a, 1, 20, MS);
	stream_end(a->streams[1]);
	run_all();
	CHECK_EQUAL(a->completed[1], 2);
	CHECK_EQUAL(sm_time(a), 10 * 2 * MS + 1);
}

static void short_blocks_cost_few_events_and_the_same_time(void)
{
	struct client *a;
	uint64_t start, events = 0;

	begin(shape(10));
	a = join();
	warm(a);
	start = model_now(model);
	launch(a, 0, 20 * 100000, US); /* 100,000 waves */
	mark(a, 0, 1);
	while (model_next(model) != UINT64_MAX) {
		model_step(model, UINT64_MAX);
		events++;
	}
	CHECK_EQUAL(a->marks[1] - start, 100000 * US);
	CHECK(events <= 2500);
	CHECK_EQUAL(sm_time(a), 10 * 100000 * US + 1);
}

static void absurd_lengths_do_not_turn_time_around(void)
{
	struct client *a;
	struct device_state before, after;

	begin(shape(10));
	a = join();
	warm(a);
	model_advance(model, 10 * MS);
	device_read(model, 0, &before);
	launch(a, 0, UINT64_MAX, UINT64_MAX);
	copy(a, 1, COPY_H2D, UINT64_MAX);
	copy(a, 2, COPY_D2D, UINT64_MAX);
	model_advance(model, 20 * MS);
	device_read(model, 0, &after);
	CHECK_EQUAL(after.busy_ns - before.busy_ns, 10 * MS);
	CHECK_EQUAL(after.sm_active_ns - before.sm_active_ns, 10 * MS);
}

/* ---- random work ---- */

static uint64_t random_state;

static uint64_t pick(uint64_t below)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state % below;
}

static void random_command(struct client *client)
{
	uint32_t stream = (uint32_t)pick(CLIENT_STREAMS);

	switch (pick(6)) {
	case 0:
		copy(client, stream, (enum copy_kind)pick(4), pick(3000000));
		break;
	case 1:
		mark(client, stream, pick(64));
		break;
	case 2:
		wait_for(client, stream, client, (uint32_t)pick(CLIENT_STREAMS));
		break;
	default:
		launch(client, stream, 1 + pick(100), pick(3) ? pick(200 * US) : pick(5 * MS));
	}
}

static uint64_t sm_time_of_all(void)
{
	uint64_t sum = 0;

	for (uint32_t c = 0; c < client_count; c++)
		sum += sm_time(&clients[c]);
	return sum;
}

static void replace_one(void)
{
	struct client *client = &clients[pick(client_count)];
	struct record *record = client->record;
	bool mps = pick(2);

	context_end(client->context);
	*client = (struct client){.record = record};
	client->context = context_new(model, 0, client, record, mps, 1 + (unsigned)pick(100), (int)pick(2));
	for (uint32_t s = 0; s < CLIENT_STREAMS; s++)
		client->streams[s] = stream_new(client->context, s, -(int)pick(7));
}

/* Σ of the processes' SM time = the device's at every moment, SMs are never oversold, and everything completes. */
static void random_work_conserves_sm_time_and_completes(void)
{
	for (uint64_t seed = 1; seed <= 60; seed++) {
		unsigned sms = 1 + (unsigned)(seed * 7 % 40);
		struct device_state state;

		random_state = seed * 0x9e3779b97f4a7c15ull;
		memset(clients, 0, sizeof(clients));
		client_count = 0;
		begin(shape(sms));
		for (int c = 0; c < 6; c++)
			join_as(0, c % 2, 1 + (unsigned)pick(100), (int)pick(2));
		for (int round = 0; round < 400; round++) {
			for (uint64_t n = pick(4); n > 0; n--)
				random_command(&clients[pick(client_count)]);
			if (pick(50) == 0)
				replace_one();
			model_advance(model, model_now(model) + pick(MS));
			device_read(model, 0, &state);
			CHECK_EQUAL(sm_time_of_all() / sms, state.sm_active_ns);
			CHECK(state.sm_active_ns <= state.busy_ns && state.busy_ns <= model_now(model));
		}
		run_all();
		for (uint32_t c = 0; c < client_count; c++)
			for (int s = 0; s < CLIENT_STREAMS; s++)
				CHECK_EQUAL(clients[c].completed[s], clients[c].submitted[s]);
		device_read(model, 0, &state);
		CHECK_EQUAL(sm_time_of_all() / sms, state.sm_active_ns);
		model_free(model);
	}
	client_count = 0;
	model = NULL;
}

static void an_added_device_has_sms_and_memory_of_its_own(void)
{
	struct device_state state;
	struct client *whole, *part;
	unsigned device;

	begin(shape(8));
	device = device_add(model, 2, 1 << 20);
	CHECK_EQUAL(device, 1);
	CHECK_EQUAL(device_count(model), 2);
	CHECK(device_idle(model, device));
	whole = join();
	part = join_as(device, false, 0, 0);
	CHECK(!device_idle(model, device));
	warm(whole);
	warm(part);
	whole->record->sm_ns = part->record->sm_ns = 0;
	launch(whole, 0, 16, MS); /* two blocks fit on an SM: one wave */
	launch(part, 0, 16, MS); /* four */
	run_all();
	CHECK_EQUAL(sm_time(whole), 8 * MS);
	CHECK_EQUAL(sm_time(part), 8 * MS);
	record_read(model, part->record);
	CHECK_EQUAL(part->record->truth.sm_ns, 4 * MS); /* of its two SMs */
	device_read(model, device, &state);
	CHECK(state.sm_active_ns >= 4 * MS);
	CHECK(memory_take(model, device, 1 << 20));
	CHECK(!memory_take(model, device, 1));
	CHECK(memory_take(model, 0, 1 << 20));
	memory_give(model, device, 1 << 20);
	memory_give(model, 0, 1 << 20);
}

static void an_added_device_takes_no_turns_with_the_others(void)
{
	struct client *whole, *part;
	uint64_t begun;

	begin(shape(8));
	part = join_as(device_add(model, 2, 1 << 20), false, 0, 0);
	whole = join();
	warm(whole);
	warm(part);
	begun = model_now(model);
	for (int i = 0; i < 10; i++) {
		launch(whole, 0, 16, MS);
		launch(part, 0, 4, MS);
	}
	mark(whole, 0, 1);
	mark(part, 0, 1);
	run_all();
	CHECK_EQUAL(whole->marks[1] - begun, 10 * MS);
	CHECK_EQUAL(part->marks[1] - begun, 10 * MS);
}

#define TEST(name)                                                                                                     \
	{                                                                                                              \
#name, name                                                                                            \
	}

static const struct {
	const char *name;
	void (*run)(void);
} TESTS[] = {
	TEST(one_wave_takes_the_time_of_a_block),
	TEST(the_bit_beyond_a_wave_has_its_sms_to_itself),
	TEST(a_stream_is_a_queue),
	TEST(streams_of_a_context_overlap),
	TEST(a_launch_counts_from_its_own_time_however_late_it_is_taken),
	TEST(contexts_take_turns),
	TEST(three_contexts_take_turns_in_a_ring),
	TEST(a_context_without_work_gives_way_at_once),
	TEST(what_runs_stops_at_the_end_of_a_slice_and_goes_on_in_the_next),
	TEST(turns_are_equal_however_long_the_kernels_are),
	TEST(a_newcomer_waits_for_the_rest_of_the_slice_of_one_that_was_alone),
	TEST(a_context_that_ends_between_its_turns_finishes_in_them),
	TEST(a_stream_that_is_destroyed_between_turns_finishes_its_work),
	TEST(under_mps_contexts_share_the_sms),
	TEST(a_percentage_caps_the_sms_held_and_rounds_up),
	TEST(a_capped_client_does_not_block_those_behind_it),
	TEST(left_over_sms_go_to_the_next_kernel),
	TEST(an_sm_finishes_the_blocks_that_came_first),
	TEST(blocks_wait_only_for_those_on_their_own_sm),
	TEST(a_client_below_normal_waits_for_none),
	TEST(where_priority_counts_normal_clients_get_the_first_free_slots),
	TEST(an_urgent_stream_goes_before_an_older_one),
	TEST(an_mps_group_and_a_context_of_its_own_take_turns),
	TEST(copies_share_one_link_in_each_direction_beside_kernels),
	TEST(copies_within_the_device_take_sms_and_turns),
	TEST(a_copy_gets_its_part_of_the_link_from_the_moment_it_begins),
	TEST(copies_wait_for_each_other_where_few_are_let_onto_the_link),
	TEST(a_context_that_ends_leaves_no_copy_that_waits_for_sms),
	TEST(a_wait_holds_a_stream_until_the_other_gets_there),
	TEST(a_wait_reaches_across_devices),
	TEST(a_wait_for_what_is_gone_ends),
	TEST(a_dead_client_s_blocks_finish_and_its_queue_vanishes),
	TEST(a_destroyed_stream_finishes_its_work),
	TEST(short_blocks_cost_few_events_and_the_same_time),
	TEST(absurd_lengths_do_not_turn_time_around),
	TEST(an_added_device_has_sms_and_memory_of_its_own),
	TEST(an_added_device_takes_no_turns_with_the_others),
	TEST(random_work_conserves_sm_time_and_completes),
};

int main(int argc, char **argv)
{
	for (size_t i = 0; i < sizeof(TESTS) / sizeof(TESTS[0]); i++) {
		if (argc < 2)
			puts(TESTS[i].name);
		else if (strcmp(argv[1], TESTS[i].name) == 0) {
			TESTS[i].run();
			if (model)
				model_free(model);
			return 0;
		}
	}
	return argc < 2 ? 0 : 2;
}
