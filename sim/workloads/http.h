/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The service over HTTP/1.1: GET /infer, /metrics and /healthz, with keep-alive, a thread per connection. */
#ifndef GPUWARDEN_WORKLOADS_HTTP_H
#define GPUWARDEN_WORKLOADS_HTTP_H

#include "service.h"

/*
 * Listens on address:port (port 0: any free one) and serves for as long as the program lives. Returns the port.
 * Ends the program when the address cannot be had.
 */
unsigned http_serve(struct service *service, const char *address, unsigned port);

#endif
