/* harness/record/record_schema.h - the fields of a record (record.h), as tables. */
#pragma once
#include "record.h"
#include "schema.h"

#define DP_RECORD_SCHEMA "deltaproof-record"
#define DP_RECORD_VERSION 1
#define DP_RECORD_MAX_RANKS 4096

extern const dp_object_schema dp_record_schema; /* of a dp_record */
