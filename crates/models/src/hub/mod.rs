//! Download from Hugging Face's API into a content-addressed cache.
//!
//! A [`RepositoryName`] is looked up in the [`ModelCache`]; a [`Hub`] lists a repository's files and pulls them. Networking is
//! behind the feature `network`; without it the cache can still be used.

mod cache;
#[cfg(feature = "network")]
mod checksum;
#[cfg(feature = "network")]
mod choosing;
#[cfg(feature = "network")]
mod client;
#[cfg(feature = "network")]
mod download;
mod error;
#[cfg(feature = "network")]
mod http;
mod listing;
mod locks;
mod name;
mod partial;
mod proxy;
mod removal;
mod revisions;
mod selection;
mod settings;

pub use cache::{CachedFile, CachedModel, DEFAULT, ModelCache, OtherFiles, OtherKind};
#[cfg(feature = "network")]
pub use choosing::ChosenModel;
#[cfg(feature = "network")]
pub use client::{Hub, PullObserver, PullProgress, PullStage};
pub use error::{HubError, HubResult};
pub use listing::{Listing, RemoteChecksum, RemoteFile};
pub use name::RepositoryName;
pub use partial::PartialDownload;
pub use proxy::ProxySettings;
pub use selection::{ModelChoice, choices, find_choice, quant_of};
pub use settings::HubSettings;
