/* harness/mpi/by_tcp.h - how messages by sockets begin (by_tcp.c), for it and for its fuzzer. */
#pragma once
#include "carrier.h"

/* The job's arrays for its size; nobody is there. */
void dp_tcp_open(const dp_process *own);
/* This rank is at the other end of fd; -1: nobody is. */
void dp_tcp_take(int rank, int fd);
