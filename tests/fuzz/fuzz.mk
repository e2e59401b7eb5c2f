# The binding under sanitizers, and fuzzers that look for new paths through it.
#   make sanitize                  C++ tests in every variant, and the tests of bad input with a sanitized binding
#   make fuzz FUZZ_SECONDS=600     every fuzzer for ten minutes
# The same module serves both: address and undefined behaviour sanitizers, and what libFuzzer wants to know.

FUZZ_SECONDS ?= 60
SANITIZED := build/sanitized
SANITIZED_FLAGS := -std=c++20 -O1 -g1 -fPIC -fno-omit-frame-pointer -fvisibility=hidden -fvisibility-inlines-hidden \
    -ffp-contract=off -fno-trapping-math
SANITIZED_TESTS := $(addprefix tests/,$(addsuffix .py,package/test_bad_input package/test_survival \
    segment/test_border segment/test_handle checkpoint/test_checkpoint checkpoint/test_restore \
    checkpoint/test_restore_beside_others weights/test_weights buffer/test_bad_rows buffer/test_buffer \
    buffer/test_conversion buffer/test_trajectory_refusals buffer/test_trajectory_vector_refusals buffer/test_writer))
# The address sanitizer must be there before Python allocates, and libstdc++ before it looks for what exceptions call.
SANITIZED_RUN = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(SANITIZED) UBSAN_OPTIONS=print_stacktrace=1 \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:handle_segv=2 \
    LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)"

.PHONY: sanitize fuzz

sanitize: $(SANITIZED)/torchreplay  ## C++ tests and the binding under address, undefined and thread sanitizers
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-cpp CPP_VARIANTS="address thread"
	$(SANITIZED_RUN) $(BIN)/python -m pytest $(SANITIZED_TESTS) $(ARGS)

fuzz: $(SANITIZED)/torchreplay $(SANITIZED)/libfuzzer.so  ## coverage-guided fuzzing, FUZZ_SECONDS=60 for each fuzzer
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(ARGS)

# The package, as links to the sources, with another native module.
$(SANITIZED)/torchreplay: $(SANITIZED)/_C.abi3.so $(shell find torchreplay -name '*.py')
	@rm -rf $@ && mkdir -p $@ && ln -s ../_C.abi3.so $@
	@cp --recursive --symbolic-link --no-clobber $(CURDIR)/torchreplay $(SANITIZED)

$(SANITIZED)/_C.abi3.so: $(SANITIZED)/coverage.o cpp/python.cpp $(wildcard cpp/*/*.h)
	$(CXX) $(SANITIZED_FLAGS) -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-stringop-overflow \
	    -fsanitize-coverage=trace-pc,trace-cmp -shared -DPy_LIMITED_API=0x030B0000 $(CPP_INCLUDES) cpp/python.cpp $< -o $@

$(SANITIZED)/coverage.o: tests/fuzz/coverage.cpp tests/fuzz/fuzz.mk $(STAMPS)/build
	@mkdir -p $(@D)
	$(CXX) $(SANITIZED_FLAGS) -Wall -Wextra -c $< -o $@

# atheris brings libFuzzer as a library; as a shared one it serves Python and the native module alike.
$(SANITIZED)/libfuzzer.so: $(STAMPS)/fuzz
	@mkdir -p $(@D)
	$(CXX) -shared -Wl,--whole-archive "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/libclang_rt.fuzzer_no_main.a" \
	    -Wl,--no-whole-archive -pthread -o $@

$(STAMPS)/fuzz: $(STAMPS)/env
	@$(PIP) install -qq -c constraints.txt "torchreplay[fuzz]" || { echo "fuzzing needs atheris, which cannot be installed \
	    here: it has wheels for Linux on x86-64 and CPython 3.11 to 3.13. Nothing was fuzzed."; exit 1; }
	@touch $@
