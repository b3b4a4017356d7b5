/* harness/commands/write_record.h - what run and judge leave behind: the record where --json says,
 * and in the folder of --out record, junit.xml, page and figures. */
#ifndef DP_WRITE_RECORD_H
#define DP_WRITE_RECORD_H
#include "harness/record/record.h"
#include "options.h"

/* Can everything that the command will write be written? Asked before it; 0, or 2 after a message.
 * It also removes an earlier command's outputs in the folder of --out. */
int dp_outputs_check(const dp_options *o);

/* Writes, prints digest and verdict; the exit status of the command. */
int dp_record_finish(const dp_options *o, const dp_record *rec);

#endif
