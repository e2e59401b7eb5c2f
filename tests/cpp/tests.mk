# C++ unit tests. For each variant, the files of a folder in tests/cpp/ are compiled together to one program, which
# spares compiling the core for each of them; and those of all folders in which processes die at fault points.
#   make run-plain-draw                    the tests of one folder
#   make test-cpp                          with address and undefined sanitizers; what dies at any instruction: plain
#   make test-cpp CPP_VARIANTS="plain address thread"    all of them, in all variants (part of `make soak`)
#   make test-cpp CPP_VARIANTS=aarch64     64-bit ARM under emulation: needs g++-aarch64-linux-gnu and qemu-user-static

CPP_FLAGS_plain := -O1
CPP_FLAGS_address := -Og -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
CPP_FLAGS_thread := -O1 -g1 -fno-omit-frame-pointer -fsanitize=thread -Wno-tsan -DTORCHREPLAY_RACEFREE
CPP_FLAGS_aarch64 := -O1 -static

CPP_CXX_aarch64 := aarch64-linux-gnu-g++
CPP_RUN_aarch64 := timeout 1800 qemu-aarch64-static
# The emulator has no robust mutexes (its set_robust_list is ENOSYS): what a process locked that died stays locked.
CPP_SKIP_aarch64 := faults
CPP_ARGS_aarch64 := --run_test='!test_recovery'
CPP_ARGS_aarch64 += --run_test='!test_page_recovery'
CPP_ARGS_aarch64 += --run_test='!test_mutex'
CPP_ARGS_aarch64 += --run_test='!*/a_mutex_that_a_dead_process_holds_and_its_half_done_absorption_are_of_the_past'
CPP_ARGS_aarch64 += --run_test='!*/a_publisher_killed_in_between_harms_neither_readers_nor_the_next_publisher'
# Nor does it hand on madvise: no huge pages, and no pages that are taken before they are written.
CPP_ARGS_aarch64 += --run_test='!*/huge_pages_are_there_when_they_were_taken_and_hold_what_is_written'
CPP_ARGS_aarch64 += --run_test='!*/what_a_part_of_a_file_takes_is_in_that_part'

# ThreadSanitizer of GCC 12 cannot map its shadow under the wider address randomisation of newer kernels.
CPP_RUN_thread := env TSAN_OPTIONS=die_after_fork=0 setarch -R
# Forks copy the tables of all pages: a large quarantine of freed memory, and stack frames that are kept for a look after
# their return, make thousands of them three times as slow.
CPP_RUN_address = ASAN_OPTIONS=quarantine_size_mb=4:detect_stack_use_after_return=$(if $(filter $*,$(CPP_FORKING)),0,1) \
    UBSAN_OPTIONS=print_stacktrace=1
CPP_FORKING := deaths faults
# A sanitizer explains a crash better than Boost.Test, which would catch the signal first.
CPP_ARGS_address := --catch_system_errors=no
CPP_ARGS_thread := --catch_system_errors=no

CPP_OUT := build/cpp
CPP_TESTS := $(wildcard tests/cpp/*/test_*.cpp)
CPP_FAULTS := $(shell grep -l 'define TORCHREPLAY_FAULTS' $(CPP_TESTS))
CPP_FOLDERS := $(notdir $(patsubst %/,%,$(sort $(dir $(filter-out $(CPP_FAULTS),$(CPP_TESTS))))))
# What takes longest comes first.
CPP_PROGRAMS := $(CPP_FORKING) draw $(filter-out $(CPP_FORKING) draw,$(CPP_FOLDERS))
CPP_BOOST = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/cmeel.prefix/include
CPP_COMPILE = $(or $(CPP_CXX_$(1)),$(CXX)) -std=c++20 -Wall -Wextra -ffp-contract=off -fno-trapping-math \
    -Icpp -Itests/cpp/support -iquote . -isystem $(CPP_BOOST)

.PHONY: test-cpp
.SECONDARY:

ifdef CPP_VARIANTS
test-cpp: $(foreach variant,$(CPP_VARIANTS),$(patsubst %,run-$(variant)-%,$(filter-out $(CPP_SKIP_$(variant)),$(CPP_PROGRAMS))))
else  # the instructions that a sanitizer adds are no places to die at
test-cpp: run-plain-deaths $(patsubst %,run-address-%,$(filter-out deaths,$(CPP_PROGRAMS)))
endif

# The runner needs no sanitizer: it is linked after the test's own, instrumented code.
define cpp_runner
$(CPP_OUT)/runner$(1:%=-%).o: tests/cpp/support/runner.cpp $(STAMPS)/env
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1)) -O0 -c $$< -o $$@
endef
$(foreach machine,"" aarch64,$(eval $(call cpp_runner,$(filter-out "",$(machine)))))

# A program includes its files. Their folder is newer than the program when one was added or removed.
define cpp_program
$(CPP_OUT)/$(1).cpp: $(sort $(dir $(2))) tests/cpp/tests.mk
	@mkdir -p $$(@D)
	@printf '#include "%s"\n' $(2) > $$@
endef
$(foreach folder,$(CPP_FOLDERS),$(eval $(call cpp_program,$(folder),\
    tests/cpp/support/reached.h $(filter-out $(CPP_FAULTS),$(wildcard tests/cpp/$(folder)/test_*.cpp)))))
$(eval $(call cpp_program,faults,$(CPP_FAULTS)))

define cpp_variant
$(CPP_OUT)/$(1)/%: $(CPP_OUT)/%.cpp $(CPP_OUT)/runner$(if $(CPP_CXX_$(1)),-$(1)).o
	@mkdir -p $$(@D)
	$$(call CPP_COMPILE,$(1)) $$(CPP_FLAGS_$(1)) -MMD -MP -MT $$@ -MF $$@.d -c $$< -o $$@.o
	$$(or $$(CPP_CXX_$(1)),$$(CXX)) $$(CPP_FLAGS_$(1)) $$@.o $(CPP_OUT)/runner$(if $(CPP_CXX_$(1)),-$(1)).o -o $$@ -pthread

.PHONY: $(CPP_PROGRAMS:%=run-$(1)-%)
$(CPP_PROGRAMS:%=run-$(1)-%): run-$(1)-%: $(CPP_OUT)/$(1)/%
	@echo "$(1) $$*"
	@$$(CPP_RUN_$(1)) $$< --color_output=no $$(CPP_ARGS_$(1))

-include $(CPP_PROGRAMS:%=$(CPP_OUT)/$(1)/%.d)
endef
$(foreach variant,plain address thread aarch64,$(eval $(call cpp_variant,$(variant))))
