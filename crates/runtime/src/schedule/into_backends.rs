//! Backends as callers have them: one, several of one type, or several of different types.

use std::sync::Arc;

use crate::Backend;

/// One backend, by value or shared.
pub trait IntoBackend {
    /// The backend, shared.
    fn into_backend(self) -> Arc<dyn Backend>;
}

impl<B: Backend + 'static> IntoBackend for B {
    fn into_backend(self) -> Arc<dyn Backend> {
        Arc::new(self)
    }
}

impl<B: Backend + 'static> IntoBackend for Arc<B> {
    fn into_backend(self) -> Arc<dyn Backend> {
        self
    }
}

impl IntoBackend for Arc<dyn Backend> {
    fn into_backend(self) -> Arc<dyn Backend> {
        self
    }
}

/// Backends in order of preference: an array, vector or slice of one type, a tuple of different ones, or a single one.
pub trait IntoBackends {
    /// The backends, shared.
    fn into_backends(self) -> Vec<Arc<dyn Backend>>;
}

impl<B: IntoBackend, const N: usize> IntoBackends for [B; N] {
    fn into_backends(self) -> Vec<Arc<dyn Backend>> {
        self.into_iter().map(IntoBackend::into_backend).collect()
    }
}

impl<B: IntoBackend> IntoBackends for Vec<B> {
    fn into_backends(self) -> Vec<Arc<dyn Backend>> {
        self.into_iter().map(IntoBackend::into_backend).collect()
    }
}

impl<B: IntoBackend + Clone> IntoBackends for &[B] {
    fn into_backends(self) -> Vec<Arc<dyn Backend>> {
        self.iter().cloned().map(IntoBackend::into_backend).collect()
    }
}

impl<B: Backend + 'static> IntoBackends for B {
    fn into_backends(self) -> Vec<Arc<dyn Backend>> {
        vec![self.into_backend()]
    }
}

impl<B: Backend + 'static> IntoBackends for Arc<B> {
    fn into_backends(self) -> Vec<Arc<dyn Backend>> {
        vec![self]
    }
}

impl IntoBackends for Arc<dyn Backend> {
    fn into_backends(self) -> Vec<Arc<dyn Backend>> {
        vec![self]
    }
}

impl<A: IntoBackend, B: IntoBackend> IntoBackends for (A, B) {
    fn into_backends(self) -> Vec<Arc<dyn Backend>> {
        vec![self.0.into_backend(), self.1.into_backend()]
    }
}

impl<A: IntoBackend, B: IntoBackend, C: IntoBackend> IntoBackends for (A, B, C) {
    fn into_backends(self) -> Vec<Arc<dyn Backend>> {
        vec![self.0.into_backend(), self.1.into_backend(), self.2.into_backend()]
    }
}
