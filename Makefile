# deltaproof: make verify | test | bench | report | clean.   Every path can be set: make BUILD=/tmp/x CC=clang
BUILD   ?= build
CC      ?= gcc
CXX     ?= g++
AR      ?= ar
PKG     ?= pkg-config
CASES   ?= cases
SAN     ?= 0
CFLAGS  ?= -O3 -g
CFLAGS  += -std=gnu11 -Wall -Wextra -Wno-unknown-pragmas -ffp-contract=off -fopenmp -MMD -MP
CXXFLAGS ?= -O1 -g
CXXFLAGS += -std=c++14 -Wall -MMD -MP
ifeq ($(SAN),1)
BUILD   := $(BUILD)/san
CFLAGS  += -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
CXXFLAGS += -fsanitize=address,undefined
LDFLAGS += -fsanitize=address,undefined
endif
LIBS    := -lmpfr -lgmp -llapacke -lopenblas -ljansson -linih -lxxhash -lquadmath -lm -lpthread

REF     := $(wildcard ref/*.c)
HARNESS := $(filter-out harness/main.c,$(wildcard harness/*.c))
TESTS   := $(wildcard harness/tests/*.c)
BENCH   := $(wildcard harness/bench/*.c)
obj      = $(patsubst %.c,$(BUILD)/%.o,$(1))

.PHONY: all verify test bench report clean setup
all: $(BUILD)/deltaproof

setup:
	@scripts/setup $(BUILD)

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -c $< -o $@
$(BUILD)/%.o: %.cc
	@mkdir -p $(@D)
	$(CXX) $(CPPFLAGS) $(CXXFLAGS) -c $< -o $@
$(BUILD)/libref.a: $(call obj,$(REF) $(HARNESS))
	@rm -f $@
	$(AR) rcs $@ $^
$(BUILD)/deltaproof: $(BUILD)/harness/main.o $(BUILD)/libref.a
	$(CC) $(CFLAGS) $(LDFLAGS) $^ $(LIBS) -o $@
$(BUILD)/dp-test: $(BUILD)/harness/tests/gt.o $(call obj,$(TESTS)) $(BUILD)/libref.a
	$(CXX) -fopenmp $(LDFLAGS) $^ -lgtest $(LIBS) -o $@
$(BUILD)/bench/%: harness/bench/%.c $(BUILD)/libref.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(LDFLAGS) $^ $(LIBS) -o $@

clean:
	rm -rf $(BUILD)
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
