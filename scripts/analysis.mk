# Static analysis of the code, and coverage of the tests.
#   make tidy       clang-tidy with the checks of .clang-tidy
#   make analyze    gcc -fanalyzer
#   make coverage [FILTER=*] [GCOVR=gcovr]   lines and branches that the tests run, by folder, into
#                   COVERED (BUILD/coverage/coverage.md); GCOVR: pip install gcovr
# Both analyses end with status 2 at the first report that its line does not answer: NOLINTNEXTLINE
# or a pragma, with the reason.
TIDY    ?= $(firstword $(shell command -v clang-tidy-14 clang-tidy 2>/dev/null) clang-tidy-14)
GCOVR   ?= gcovr
COVERED ?= $(BASE)/coverage/coverage.md

.PHONY: tidy analyze coverage
tidy: compile_commands.json    ## clang-tidy (version 14) on ref and harness
	@$(TIDY) --version >/dev/null
	@printf '%s\n' $(REF) $(HARNESS) | xargs -P$(JOBS) -n1 $(TIDY) -p . --quiet 2>&1 | \
	    { ! grep -vE '^([0-9]+ warnings? generated\.|)$$'; }

# Vectors of double-doubles, unrolled: the analyzer does not end.
ifeq ($(notdir $(BUILD)),analyze)
$(addprefix $(BUILD)/ref/truth/truth_dd_,avx2.o avx512.o plain.o wide.o): \
    private C_ALL += -fno-analyzer
endif
# Texts of limited length are cut on purpose.
analyze:                       ## gcc -fanalyzer on ref and harness
	+@$(MAKE) --no-print-directory -s -j$(JOBS) GPU=0 WERROR=1 BUILD=$(BASE)/analyze \
	    CFLAGS='-O1 -fanalyzer -Wno-format-truncation' $(BASE)/analyze/libref.a

coverage: setup                ## what the tests run of ref and harness (FILTER; gcovr)
	@$(GCOVR) --version >/dev/null
	+@$(MAKE) --no-print-directory -s -j$(JOBS) GPU=0 BUILD=$(BASE)/coverage \
	    CFLAGS='-O1 -g --coverage' LDFLAGS='$(LDFLAGS) --coverage' \
	    $(addprefix $(BASE)/coverage/,deltaproof bridge.so dp-test)
	@find $(BASE)/coverage -name '*.gcda' -delete
	@$(run_env) DP_PROGRAM="$$(realpath $(BASE)/coverage/deltaproof)" \
	    DP_CASES="$$(realpath $(CASES))" scripts/shards $(SHARDS) $(BASE)/coverage/dp-test \
	    $(if $(FILTER),--gtest_filter='$(FILTER)') || echo "coverage: what they ran counts, too"
	@$(GCOVR) --root . --object-directory $(BASE)/coverage --json-summary-pretty \
	    --gcov-ignore-parse-errors=all -f ref/ -f harness/ -e harness/tests/ $(BASE)/coverage \
	    >$(BASE)/coverage/summary.json
	@scripts/coverage $(BASE)/coverage/summary.json '$(or $(FILTER),*)' >$(COVERED)
	@cat $(COVERED)
