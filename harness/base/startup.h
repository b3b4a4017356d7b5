/* harness/base/startup.h - what the program asks of the process that it runs in, and how it may
 * end.
 *
 * Exit status 1 means "a verdict failed" and nothing else: it is main's alone. A signal, or output
 * that cannot be written, ends the program with another status and a message. So does a library
 * that ends it (threads that cannot be started).
 */
#pragma once

/* First of all in main. Arguments that are not text, threads whose stacks are too small: 2, after a
 * message that names what is wrong; else 0. Too little address space ends the program so. */
int dp_startup(int argc, char **argv);

/* Was this process started by mpirun? */
int dp_under_mpirun(void);

/* Last of all in main: `return dp_ending(status)`. */
int dp_ending(int status);

/* Said once, from a thread of its own, when SIGINT, SIGTERM or SIGHUP ends the program: what is
 * finished. Files in progress are removed. A second signal ends it at once. */
void dp_on_interrupt(void (*say)(void *arg), void *arg);

/* For processes that were forked: signals as in a new program. */
void dp_interrupt_default(void);
