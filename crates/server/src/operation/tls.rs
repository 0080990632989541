//! TLS: a certificate and a key in PEM files, which are read again when they change.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use rustls::ServerConfig;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The certificate and the key of a server.
pub struct TlsFiles {
    certificate: PathBuf,
    key: PathBuf,
    current: Mutex<Current>,
}

struct Current {
    config: Arc<ServerConfig>,
    versions: Versions,
}

/// The time and length of both files.
type Versions = [Option<(SystemTime, u64)>; 2];

impl std::fmt::Debug for TlsFiles {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("TlsFiles").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

impl TlsFiles {
    /// Reads a certificate, with those that certify it after it, and its key.
    ///
    /// # Errors
    /// A file cannot be read, or they do not belong together.
    pub fn open(certificate: PathBuf, key: PathBuf) -> Result<TlsFiles, String> {
        let versions = versions(&certificate, &key);
        let config = read(&certificate, &key)?;
        Ok(TlsFiles { certificate, key, current: Mutex::new(Current { config, versions }) })
    }

    /// How the next connection is encrypted. Files that have changed are read again; as long as they do not belong together,
    /// those from before are used.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let versions = versions(&self.certificate, &self.key);
        if versions != current.versions {
            current.versions = versions;
            match read(&self.certificate, &self.key) {
                Ok(config) => {
                    tracing::info!("the certificate was read again");
                    current.config = config;
                }
                Err(error) => tracing::warn!(error, "the certificate from before is kept"),
            }
        }
        Arc::clone(&current.config)
    }
}

fn versions(certificate: &Path, key: &Path) -> Versions {
    let version = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        Some((found.modified().ok()?, found.len()))
    };
    [version(certificate), version(key)]
}

fn read(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, String> {
    let unreadable = |path: &Path, error| format!("{}: {error}", path.display());
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>())
        .map_err(|error| unreadable(certificate, error))?;
    if chain.is_empty() {
        let has = match PrivateKeyDer::from_pem_file(certificate) {
            Ok(_) => "; it holds a private key",
            Err(_) => "",
        };
        return Err(format!("{}: there is no certificate in PEM form{has}", certificate.display()));
    }
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            let has = match CertificateDer::from_pem_file(key) {
                Ok(_) => "; it holds a certificate",
                Err(_) => "",
            };
            format!("{}: there is no private key in PEM form{has}", key.display())
        }
        error => unreadable(key, error),
    })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret));
    let mut config = config.map_err(|error| {
        format!("the certificate {} and the key {}: {error}", certificate.display(), key.display())
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
