// SPDX-License-Identifier: Apache-2.0
//! Decode steps of one request on the CPU, from Rust through the C interface of libfovea.so. Equal
//! keys have equal weights, so out is the mean of the values so far. rustc alone builds it:
//!   rustc --edition 2021 -L <folder of libfovea.so> decode.rs && ./decode
use std::ffi::CStr;
use std::mem::{size_of, MaybeUninit};
use std::os::raw::{c_char, c_void};
use std::process::ExitCode;
use std::ptr::{null, null_mut};

/// Declarations of include/fovea, as a binding generator would write them.
#[allow(dead_code)]
mod ffi {
    use super::{c_char, c_void};

    #[repr(C)]
    #[derive(Clone, Copy)]
    pub struct Device {
        pub kind: i32,
        pub index: i32,
    }

    #[repr(C)]
    pub struct AttentionSpec {
        pub struct_size: u32,
        pub kind: i32,
        pub scope: i32,
        pub mask: i32,
        pub q_heads: i32,
        pub kv_heads: i32,
        pub head_dim: i32,
        pub head_dim_v: i32,
        pub q_dtype: i32,
        pub window: i32,
        pub chunk: i32,
        pub has_rope: i32,
        pub needs_lse: i32,
        pub batch_invariant: i32,
        // The structs dual_chunk, scores, mla and linear are left out: the program has a smaller
        // struct_size than the library, which takes their defaults.
    }

    #[repr(C)]
    pub struct KvCacheSpec {
        pub struct_size: u32,
        pub layout: i32,
        pub order: i32,
        pub dtype: i32,
        pub scale: i32,
        pub layers: i32,
        pub kv_heads: i32,
        pub head_dim: i32,
        pub head_dim_v: i32,
        pub page_size: i32,
        pub window: i32,
    }

    #[repr(C)]
    pub struct BatchLimits {
        pub struct_size: u32,
        pub max_requests: i32,
        pub max_tokens: i32,
        pub max_q_len: i32,
        pub max_kv_len: i32,
        pub max_encoder_len: i32,
        pub prefix_levels: i32,
        pub reserved: i32,
        pub min_prefix_savings: i64,
        pub workspace_budget: i64,
    }

    #[repr(C)]
    pub struct SelectionRequest {
        pub struct_size: u32,
        pub allow_none: i32,
        pub spec: *const AttentionSpec,
        pub cache: *const KvCacheSpec,
        pub limits: *const BatchLimits,
        pub device: *const c_void,
        pub backend: *const c_char,
    }

    #[repr(C)]
    pub struct DlTensor {
        pub data: *mut c_void,
        pub device_type: i32,
        pub device_id: i32,
        pub ndim: i32,
        pub dtype: u32, // code, bits, lanes
        pub shape: *mut i64,
        pub strides: *mut i64,
        pub byte_offset: u64,
    }

    #[repr(C)]
    pub struct Tensor {
        pub view: DlTensor,
        pub shape: [i64; 4],
        pub strides: [i64; 4],
    }

    #[repr(C)]
    pub struct Batch {
        pub struct_size: u32,
        pub mode: i32,
        pub requests: i32,
        pub tokens: i32,
        pub q_indptr: *const DlTensor,
        pub kv_lens: *const DlTensor,
        pub request_rows: *const DlTensor,
        pub table: *const DlTensor,
        pub out_slots: *const DlTensor,
        pub positions: *const DlTensor,
        pub entry_tokens: i32,
        pub reserved: i32,
    }

    #[repr(C)]
    pub struct LayerTensors {
        pub struct_size: u32,
        pub layer: i32,
        pub q: *const DlTensor,
        pub k: *const DlTensor,
        pub v: *const DlTensor,
        pub out: *const DlTensor,
        pub lse: *const DlTensor,
        pub q_scale: *const DlTensor,
        pub save_kv: i32,
        pub reserved: i32,
    }

    #[link(name = "fovea")]
    extern "C" {
        pub fn fovea_last_error() -> *const c_char;
        pub fn fovea_version() -> *const c_char;
        pub fn fovea_attention_spec_init(spec: *mut AttentionSpec, size: usize) -> i32;
        pub fn fovea_kv_cache_spec_init(spec: *mut KvCacheSpec, size: usize) -> i32;
        pub fn fovea_batch_limits_init(limits: *mut BatchLimits, size: usize) -> i32;
        pub fn fovea_selection_request_init(request: *mut SelectionRequest, size: usize) -> i32;
        pub fn fovea_selection_create(
            request: *const SelectionRequest,
            selection: *mut *mut c_void,
        ) -> i32;
        pub fn fovea_selection_name(
            selection: *const c_void,
            text: *mut c_char,
            bytes: *mut usize,
        ) -> i32;
        pub fn fovea_selection_destroy(selection: *mut c_void) -> i32;
        pub fn fovea_kv_pool_create(
            spec: *const KvCacheSpec,
            pages: i64,
            device: Device,
            pool: *mut *mut c_void,
        ) -> i32;
        pub fn fovea_kv_pool_destroy(pool: *mut c_void) -> i32;
        pub fn fovea_thread_pool_create(threads: i32, pool: *mut *mut c_void) -> i32;
        pub fn fovea_thread_pool_destroy(pool: *mut c_void) -> i32;
        pub fn fovea_backend_create(
            selection: *const c_void,
            kv: *mut c_void,
            states: *mut c_void,
            threads: *mut c_void,
            backend: *mut *mut c_void,
        ) -> i32;
        pub fn fovea_backend_destroy(backend: *mut c_void) -> i32;
        pub fn fovea_backend_reserve(
            backend: *mut c_void,
            limits: *const BatchLimits,
            workspace: *mut c_void,
            bytes: usize,
        ) -> i32;
        pub fn fovea_tensor_init(
            tensor: *mut Tensor,
            data: *mut c_void,
            dtype: i32,
            device: Device,
            shape: *const i64,
            ndim: i32,
        ) -> i32;
        pub fn fovea_batch_init(batch: *mut Batch, size: usize) -> i32;
        pub fn fovea_layer_tensors_init(layer: *mut LayerTensors, size: usize) -> i32;
        pub fn fovea_backend_plan(
            backend: *mut c_void,
            batch: *const Batch,
            stream: *mut c_void,
        ) -> i32;
        pub fn fovea_backend_forward(
            backend: *mut c_void,
            layer: *const LayerTensors,
            stream: *mut c_void,
        ) -> i32;
    }
}

const CPU: ffi::Device = ffi::Device { kind: 0, index: 0 };
const MODE_DECODE: i32 = 1;
const F32: i32 = 0;
const I32: i32 = 5;
const I64: i32 = 6;

const STEPS: usize = 100;
const Q_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const PAGE_SIZE: usize = 16;
const PAGES: usize = 1 + (STEPS + PAGE_SIZE - 1) / PAGE_SIZE;

type Result<T> = std::result::Result<T, String>;

fn check(status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the message is valid until the next failure on this thread.
    let message = unsafe { CStr::from_ptr(ffi::fovea_last_error()) };
    Err(message.to_string_lossy().into_owned())
}

/// Returns a struct with its defaults.
fn defaults<T>(init: unsafe extern "C" fn(*mut T, usize) -> i32) -> Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `init` writes size_of::<T>() bytes; all fields are numbers or pointers.
    unsafe {
        check(init(value.as_mut_ptr(), size_of::<T>()))?;
        Ok(value.assume_init())
    }
}

/// A handle that is destroyed with its owner.
struct Handle {
    address: *mut c_void,
    destroy: unsafe extern "C" fn(*mut c_void) -> i32,
}

impl Handle {
    fn new(
        destroy: unsafe extern "C" fn(*mut c_void) -> i32,
        create: impl FnOnce(*mut *mut c_void) -> i32,
    ) -> Result<Handle> {
        let mut address = null_mut();
        check(create(&mut address))?;
        Ok(Handle { address, destroy })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is destroyed once.
        unsafe { (self.destroy)(self.address) };
    }
}

/// Returns a view of an array, which must outlive it. The view points into its own box.
fn view<T>(array: &mut [T], dtype: i32, shape: &[usize]) -> Result<Box<ffi::Tensor>> {
    assert_eq!(array.len(), shape.iter().product());
    let shape: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect();
    let mut tensor = Box::new(MaybeUninit::<ffi::Tensor>::zeroed());
    // SAFETY: the tensor is initialised by the call, and the box keeps its address.
    unsafe {
        let data = array.as_mut_ptr().cast();
        let ndim = shape.len() as i32;
        let status =
            ffi::fovea_tensor_init(tensor.as_mut_ptr(), data, dtype, CPU, shape.as_ptr(), ndim);
        check(status)?;
        Ok(Box::from_raw(Box::into_raw(tensor).cast()))
    }
}

/// Selects a backend for the layers, and creates it over a pool of its own.
fn make_backend() -> Result<Handle> {
    let mut spec = defaults(ffi::fovea_attention_spec_init)?;
    spec.q_heads = Q_HEADS as i32;
    spec.kv_heads = KV_HEADS as i32;
    spec.head_dim = HEAD_DIM as i32;
    let mut cache = defaults(ffi::fovea_kv_cache_spec_init)?;
    cache.layers = 1;
    cache.kv_heads = KV_HEADS as i32;
    cache.head_dim = HEAD_DIM as i32;
    cache.page_size = PAGE_SIZE as i32;
    let mut limits = defaults(ffi::fovea_batch_limits_init)?;
    limits.max_kv_len = STEPS as i32;
    let mut request = defaults(ffi::fovea_selection_request_init)?;
    request.spec = &spec;
    request.cache = &cache;
    request.limits = &limits;
    // SAFETY: all arguments outlive the calls; a backend keeps its pool and threads alive.
    unsafe {
        let selection = Handle::new(ffi::fovea_selection_destroy, |out| {
            ffi::fovea_selection_create(&request, out)
        })?;
        let mut name = [0 as c_char; 64];
        let mut bytes = name.len();
        check(ffi::fovea_selection_name(selection.address, name.as_mut_ptr(), &mut bytes))?;
        println!("backend {}", CStr::from_ptr(name.as_ptr()).to_string_lossy());
        let pool = Handle::new(ffi::fovea_kv_pool_destroy, |out| {
            ffi::fovea_kv_pool_create(&cache, PAGES as i64, CPU, out)
        })?;
        let threads = Handle::new(ffi::fovea_thread_pool_destroy, |out| {
            ffi::fovea_thread_pool_create(0, out)
        })?;
        let backend = Handle::new(ffi::fovea_backend_destroy, |out| {
            let (kv, threads) = (pool.address, threads.address);
            ffi::fovea_backend_create(selection.address, kv, null_mut(), threads, out)
        })?;
        check(ffi::fovea_backend_reserve(backend.address, &limits, null_mut(), 0))?;
        Ok(backend)
    }
}

/// Decodes STEPS tokens and returns out[0]. The request has the pages 1, 2, 3 ... in order.
fn decode(backend: &Handle) -> Result<f32> {
    let mut pages: Vec<i32> = (1..PAGES as i32).collect();
    let (mut q_indptr, mut lengths, mut rows, mut slots) = ([0i32, 1], [0i32], [0i32], [0i64]);
    let mut q = vec![1f32; Q_HEADS * HEAD_DIM];
    let mut k = vec![1f32; KV_HEADS * HEAD_DIM];
    let mut v = vec![0f32; KV_HEADS * HEAD_DIM];
    let mut out = vec![0f32; Q_HEADS * HEAD_DIM];
    for step in 1..=STEPS {
        lengths[0] = step as i32;
        slots[0] = (PAGE_SIZE + step - 1) as i64;
        v.fill(step as f32);
        let indptr = view(&mut q_indptr, I32, &[2])?;
        let kv_lens = view(&mut lengths, I32, &[1])?;
        let request_rows = view(&mut rows, I32, &[1])?;
        let table = view(&mut pages, I32, &[1, PAGES - 1])?;
        let out_slots = view(&mut slots, I64, &[1])?;
        let mut batch = defaults(ffi::fovea_batch_init)?;
        batch.mode = MODE_DECODE;
        batch.requests = 1;
        batch.tokens = 1;
        batch.q_indptr = &indptr.view;
        batch.kv_lens = &kv_lens.view;
        batch.request_rows = &request_rows.view;
        batch.table = &table.view;
        batch.entry_tokens = PAGE_SIZE as i32;
        batch.out_slots = &out_slots.view;
        let queries = view(&mut q, F32, &[1, Q_HEADS, HEAD_DIM])?;
        let keys = view(&mut k, F32, &[1, KV_HEADS, HEAD_DIM])?;
        let values = view(&mut v, F32, &[1, KV_HEADS, HEAD_DIM])?;
        let result = view(&mut out, F32, &[1, Q_HEADS, HEAD_DIM])?;
        let mut layer = defaults(ffi::fovea_layer_tensors_init)?;
        layer.q = &queries.view;
        layer.k = &keys.view;
        layer.v = &values.view;
        layer.out = &result.view;
        // SAFETY: the arrays of the pass outlive forward().
        unsafe {
            check(ffi::fovea_backend_plan(backend.address, &batch, null_mut()))?;
            check(ffi::fovea_backend_forward(backend.address, &layer, null_mut()))?;
        }
    }
    Ok(out[0])
}

fn run() -> Result<bool> {
    // SAFETY: the text is a constant of the library.
    let version = unsafe { CStr::from_ptr(ffi::fovea_version()) };
    println!("Fovea {}", version.to_string_lossy());
    // SAFETY: the library refuses null with a message.
    let refused = check(unsafe { ffi::fovea_backend_plan(null_mut(), null(), null_mut()) });
    println!("without a backend: {}", refused.unwrap_err());
    let backend = make_backend()?;
    let (first, mean) = (decode(&backend)?, (1 + STEPS) as f32 / 2.0);
    println!("after {STEPS} steps out[0] = {first}, the mean is {mean}");
    Ok((first - mean).abs() <= mean * 1e-5)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
