//! Reading and writing states from outside of a run.

use std::ops::Range;

use quadriga_graph::{DType, Shape};

use super::element::{Element, Values};
use super::session::Session;
use super::state::SessionState;
use crate::{Region, RuntimeError};

/// A state of a session, as [`Session::states`] lists it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StateInfo {
    /// Its name, which all graphs of the session share.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Shape,
    /// Its bytes: those of the tensor, without a backend's padding.
    pub bytes: usize,
    /// The backend that it is on, by number.
    pub backend: usize,
}

/// States: read and written between runs, wherever they are.
///
/// A state exists once a graph that declares it was [prepared](Session::prepare); it belongs to the session, not to one
/// graph. Reading and writing wait for the run in flight.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::Scheduler;
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [2]);
/// let total = g.state("total", DType::F32, [2]);
/// g.output("total", total.add(x).copy_into(total));
///
/// let mut session = Scheduler::new(quadriga_cpu::Backend::new()?).plan(g.finish()?)?.session()?;
/// session.write_state("total", &[10.0f32, 20.0])?;
/// session.run(&[("x", &[1.0f32, 2.0])])?;
/// let saved = session.state_bytes()?; // all states; `save_state` writes them to a file or any other writer
/// session.run(&[])?;
/// assert_eq!(session.read_state::<f32>("total")?, [12.0, 24.0]);
///
/// session.restore_state(saved.as_slice())?;
/// assert_eq!(session.read_state::<f32>("total")?, [11.0, 22.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Session {
    /// All states, ordered by name.
    pub fn states(&self) -> Vec<StateInfo> {
        let mut all: Vec<StateInfo> =
            self.memory.states.iter().map(|(name, state)| state.info(name)).collect();
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Reads a state. `u8` reads the bytes of any type.
    pub fn read_state<T: Element>(&mut self, name: &str) -> Result<Vec<T>, RuntimeError> {
        let elements = self.state(name)?.region().bytes / size_of::<T>().max(1);
        let mut values = vec![T::default(); elements];
        self.read_state_at(name, 0, &mut values)?;
        Ok(values)
    }

    /// Reads a part of a state: as many elements as `into` has, from element `first` on. Elements are those of `T`: for
    /// `u8`, which fits any type, they are bytes.
    pub fn read_state_at<T: Element>(
        &mut self,
        name: &str,
        first: usize,
        into: &mut [T],
    ) -> Result<(), RuntimeError> {
        let into: &mut [u8] = bytemuck::cast_slice_mut(into);
        let range = byte_range::<T>(first, into.len());
        let part = self.state(name)?.part(name, range, T::DTYPE)?;
        self.wait()?;
        let read = part.buffer.read(part.offset, into);
        read.map_err(|error| RuntimeError::device(error).at(|| name.to_owned()))
    }

    /// Writes a state.
    pub fn write_state<V: Values + ?Sized>(&mut self, name: &str, values: &V) -> Result<(), RuntimeError> {
        let (expected, found) = (self.state(name)?.region().bytes, values.bytes().len());
        if expected != found {
            return Err(RuntimeError::WrongSize { name: name.to_owned(), expected, found });
        }
        self.write_bytes(name, 0..found, values)
    }

    /// Writes a part of a state, from element `first` on. Elements are those of `values`: of bytes, which fit any type,
    /// they are bytes.
    pub fn write_state_at<T: Element>(
        &mut self,
        name: &str,
        first: usize,
        values: &[T],
    ) -> Result<(), RuntimeError> {
        let range = byte_range::<T>(first, size_of_val(values));
        self.write_bytes(name, range, values)
    }

    fn write_bytes<V: Values + ?Sized>(
        &mut self,
        name: &str,
        range: Range<usize>,
        values: &V,
    ) -> Result<(), RuntimeError> {
        let part = self.state(name)?.part(name, range, values.dtype())?;
        self.wait()?;
        let written = part.buffer.write(part.offset, values.bytes());
        written.map_err(|error| RuntimeError::device(error).at(|| name.to_owned()))
    }

    /// The state of this name.
    pub(super) fn state(&self, name: &str) -> Result<&SessionState, RuntimeError> {
        self.memory.states.get(name).ok_or_else(|| {
            let known = self.states().into_iter().map(|state| state.name).collect();
            RuntimeError::UnknownName { what: "state", name: name.to_owned(), known }
        })
    }
}

impl SessionState {
    pub(super) fn info(&self, name: &str) -> StateInfo {
        let tensor = self.tensor();
        StateInfo {
            name: name.to_owned(),
            dtype: tensor.dtype(),
            shape: *tensor.shape(),
            bytes: tensor.bytes(),
            backend: self.backend,
        }
    }

    /// Some of its bytes, if the elements have its type and there are as many.
    fn part(&self, name: &str, range: Range<usize>, given: Option<DType>) -> Result<Region, RuntimeError> {
        let found = self.tensor().dtype();
        if let Some(given) = given.filter(|given| *given != found) {
            return Err(RuntimeError::WrongType { name: name.to_owned(), found, given });
        }
        let part = self.region().part(range.start, range.end.saturating_sub(range.start));
        part.map_err(|error| RuntimeError::device(error).at(|| name.to_owned()))
    }
}

/// The bytes of elements `first..`; what overflows is out of every state's bounds.
fn byte_range<T>(first: usize, bytes: usize) -> Range<usize> {
    let start = first.saturating_mul(size_of::<T>());
    start..start.saturating_add(bytes)
}
