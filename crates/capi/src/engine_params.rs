//! Where a model runs, and how much it can hold.

use std::ffi::{c_char, c_void};

use quadriga::llm::placement::{DeviceList, GpuLayers, Placement};
use quadriga::llm::{EngineOptions, Model};
use quadriga::runtime::{Progress, Scheduler};

use crate::arguments::{Parameters, array, text};
use crate::dtype::{self, QD_DTYPE_F16, qd_dtype};
use crate::handle::{self, exclusive};
use crate::model::qd_progress_callback;
use crate::scheduler::qd_scheduler;
use crate::status::{Failure, Outcome};

/// All layers on accelerators, for qd_engine_params.gpu_layers.
pub const QD_GPU_LAYERS_ALL: i32 = -1;
/// As much on accelerators as fits their memory, for qd_engine_params.gpu_layers.
pub const QD_GPU_LAYERS_AUTO: i32 = -2;

/// Where a model runs, and how much it can hold.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_engine_params {
    /// The size of this structure.
    pub struct_size: usize,
    /// The largest number of tokens of a sequence; 0: what the model was trained with, at most 4096.
    pub context: usize,
    /// The most tokens that are computed at once.
    pub batch: usize,
    /// Sequences that are computed at once: of a service, an embedder.
    pub sequences: usize,
    /// Threads of the CPU; 0: one for each core.
    pub threads: usize,
    /// Layers on accelerators, QD_GPU_LAYERS_ALL or QD_GPU_LAYERS_AUTO.
    pub gpu_layers: i32,
    /// Bytes that the model may use on each accelerator; 0: what is free.
    pub gpu_budget: u64,
    /// Names of devices, such as "cpu" and "cuda:0"; NULL: the first GPU, if there is one, and the CPU.
    pub devices: *const *const c_char,
    /// How many.
    pub device_count: usize,
    /// Instead of devices: a scheduler whose backends, placements and budgets are used, own backends among them; or NULL.
    pub scheduler: *const qd_scheduler,
    /// The element type of keys in the KV cache: F32, F16, BF16, Q8_0, Q5_1 or Q4_0.
    pub cache_keys: qd_dtype,
    /// The element type of values in the KV cache.
    pub cache_values: qd_dtype,
    /// Called while weights are loaded, on the calling thread, or NULL. Its result is ignored.
    pub progress: qd_progress_callback,
    /// For the callback.
    pub progress_data: *mut c_void,
}

// SAFETY: numbers, addresses, and a function that may be NULL; the first field is the size.
unsafe impl Parameters for qd_engine_params {
    const NAME: &'static str = "qd_engine_params";

    fn defaults() -> qd_engine_params {
        qd_engine_params {
            struct_size: size_of::<qd_engine_params>(),
            context: 0,
            batch: EngineOptions::default().batch,
            sequences: 0,
            threads: 0,
            gpu_layers: QD_GPU_LAYERS_AUTO,
            gpu_budget: 0,
            devices: std::ptr::null(),
            device_count: 0,
            scheduler: std::ptr::null(),
            cache_keys: QD_DTYPE_F16,
            cache_values: QD_DTYPE_F16,
            progress: None,
            progress_data: std::ptr::null_mut(),
        }
    }
}

/// The default parameters of generators, services and embedders.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_engine_default_params() -> qd_engine_params {
    qd_engine_params::defaults()
}

impl qd_engine_params {
    /// The scheduler for a model: the caller's, or one for the placement, whose slots the engine gets.
    ///
    /// # Safety
    /// The addresses in the parameters obey the rules of the header.
    pub(crate) unsafe fn scheduler(&self, model: &Model, engine: &mut EngineOptions) -> Outcome<Scheduler> {
        if let Some(scheduler) = handle::get_optional(self.scheduler)? {
            return Ok(exclusive(&scheduler, "scheduler")?.clone());
        }
        // SAFETY: the caller's promise.
        let placement = unsafe { self.placement() }?;
        let placed = placement.plan(model, &placement.open_devices()?, engine)?;
        *engine = placed.engine_options(engine);
        Ok(placed.scheduler)
    }

    /// # Safety
    /// The addresses in the parameters obey the rules of the header.
    unsafe fn placement(&self) -> Outcome<Placement> {
        // SAFETY: the caller's promise.
        let names = unsafe { array(self.devices, self.device_count, "devices") }?;
        let mut devices = Vec::new();
        for name in names {
            // SAFETY: the caller's promise.
            devices.push(unsafe { text(*name, "a device") }?.parse()?);
        }
        Ok(Placement {
            devices: if devices.is_empty() { DeviceList::Auto } else { DeviceList::Named(devices) },
            threads: (self.threads != 0).then_some(self.threads),
            gpu_layers: match self.gpu_layers {
                QD_GPU_LAYERS_AUTO => GpuLayers::Auto,
                QD_GPU_LAYERS_ALL => GpuLayers::All,
                count => GpuLayers::Count(usize::try_from(count).map_err(|_| {
                    Failure::argument(format!(
                        "gpu_layers is {count}; a number, QD_GPU_LAYERS_ALL or QD_GPU_LAYERS_AUTO"
                    ))
                })?),
            },
            budget: (self.gpu_budget != 0).then_some(self.gpu_budget),
            ..Placement::default()
        })
    }

    pub(crate) fn engine(&self) -> Outcome<EngineOptions> {
        Ok(EngineOptions {
            context: self.context,
            batch: self.batch,
            cache_keys: dtype::from_id(self.cache_keys)?,
            cache_values: dtype::from_id(self.cache_values)?,
            ..EngineOptions::default()
        })
    }

    /// Tells the caller how far loading is.
    pub(crate) fn loading(&self) -> impl FnMut(Progress) {
        let (callback, data) = (self.progress, self.progress_data);
        move |progress| {
            if let Some(callback) = callback {
                callback(data, progress.done, progress.total);
            }
        }
    }
}
