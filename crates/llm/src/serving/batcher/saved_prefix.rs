//! The KV cache of a prefix as bytes: saved, and brought back later, by another process, too.
//!
//! All numbers are little-endian:
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | magic: `QDGPFX`, and the version of this format in two digits: `02` |
//! | 32 | [identity](crate::Model::identity) of the model |
//! | 4 each | element types of the KV cache's keys and values, as in GGUF |
//! | 8 | bytes of a page |
//! | 8 | number of pages |
//! | … | each page: its tokens (4 each), and its contents |
//! | 32 | SHA-256 of everything before |

use quadriga_graph::PAGE_SLOTS;
use sha2::{Digest, Sha256};

use super::Batcher;
use crate::serving::page_pool::{PageId, PagePool};
use crate::{Result, StateError};

/// The first bytes of a saved prefix.
const MAGIC: &[u8; 6] = b"QDGPFX";

/// The version of the format, as two digits behind them. The first had no checksum.
const VERSION: u32 = 2;

/// Bytes of the checksum at the end.
const SUM_BYTES: usize = 32;

/// What a saved prefix must have in common with the batcher.
const IDENTITY_BYTES: usize = 32;

impl Batcher {
    /// The KV cache of the longest beginning of `tokens` that is there in whole pages, as bytes. Nothing is computed: run a
    /// request with these tokens first. Prefixes of requests with a salt of their own are not found.
    ///
    /// # Errors
    /// The model has recurrent layers or windows with pages of their own, whose states are not saved (options with `cache_ram`
    /// keep the whole context in windows); or a page could not be read.
    pub fn save_prefix(&mut self, tokens: &[u32]) -> Result<Vec<u8>> {
        self.check_saveable()?;
        let mut saved = self.prefix_header();
        let count_at = saved.len();
        saved.extend(0_u64.to_le_bytes());
        let (mut pages, mut prefix) = (Vec::new(), PagePool::root(0));
        let mut read = Ok(());
        for tokens in tokens.chunks_exact(PAGE_SLOTS) {
            let Some((page, next)) = self.find_page(prefix, tokens) else { break };
            pages.push(page);
            prefix = next;
            match self.engine.read_page(page) {
                Ok(content) => {
                    saved.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
                    saved.extend(content);
                }
                Err(error) => {
                    read = Err(error);
                    break;
                }
            }
        }
        if let Some(count) = saved.get_mut(count_at..count_at + size_of::<u64>()) {
            count.copy_from_slice(&(pages.len() as u64).to_le_bytes());
        }
        self.release_prefix(pages);
        let sum = Sha256::digest(&saved);
        saved.extend(sum);
        read.map(|()| saved)
    }

    /// Brings back what [`Batcher::save_prefix`] has saved, as far as there are free pages. Returns the number of tokens that
    /// requests will find in the KV cache.
    ///
    /// # Errors
    /// The bytes are no saved prefix, or damaged, or that of another model, type of the KV cache or version of the format. Then
    /// the KV cache is unchanged.
    pub fn restore_prefix(&mut self, saved: &[u8]) -> Result<usize> {
        self.check_saveable()?;
        let header = self.prefix_header();
        let version = saved.strip_prefix(MAGIC).and_then(|rest| rest.split_first_chunk::<2>());
        let version = version.and_then(|(digits, _)| std::str::from_utf8(digits).ok()?.parse().ok());
        match version {
            Some(VERSION) => {}
            Some(found) => return Err(StateError::Version { found, known: VERSION }.into()),
            None => return Err(StateError::Unknown.into()),
        }
        let Some((found, rest)) = saved.split_at_checked(header.len()) else {
            return Err(StateError::Truncated.into());
        };
        if found != header {
            return Err(StateError::OtherModel.into());
        }
        let (content, sum) = saved.split_last_chunk::<SUM_BYTES>().ok_or(StateError::Truncated)?;
        if Sha256::digest(content).as_slice() != sum {
            return Err(StateError::Damaged { what: "its checksum is wrong, or its end is missing" }.into());
        }
        let rest = rest.get(..rest.len().saturating_sub(SUM_BYTES)).unwrap_or_default();
        let Some((count, rest)) = rest.split_first_chunk::<8>() else {
            return Err(StateError::Truncated.into());
        };
        // Until the last is there, none is given to others.
        let mut pages = Vec::new();
        let restored = self.restore_pages(u64::from_le_bytes(*count), rest, &mut pages);
        let tokens = pages.len() * PAGE_SLOTS;
        self.release_prefix(pages);
        restored.map(|()| tokens)
    }

    /// Writes so many pages to the KV cache, or finds them there, and adds them to `pages`, each with one more user.
    fn restore_pages(&mut self, count: u64, mut rest: &[u8], pages: &mut Vec<PageId>) -> Result<()> {
        let page_bytes = self.engine.page_bytes();
        let vocabulary = self.engine.model().hyperparameters().vocabulary;
        let mut prefix = PagePool::root(0);
        for _ in 0..count {
            let parts = rest.split_at_checked(PAGE_SLOTS * size_of::<u32>());
            let parts = parts.and_then(|(tokens, rest)| Some((tokens, rest.split_at_checked(page_bytes)?)));
            let Some((tokens, (content, after))) = parts else { return Err(StateError::Truncated.into()) };
            rest = after;
            let (tokens, _) = tokens.as_chunks::<4>();
            let tokens: Vec<u32> = tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
            if tokens.iter().any(|token| *token as usize >= vocabulary) {
                return Err(StateError::Damaged { what: "a token is not in the vocabulary" }.into());
            }
            if let Some((page, next)) = self.find_page(prefix, &tokens) {
                pages.push(page);
                prefix = next;
                continue;
            }
            // What does not fit is computed again.
            let Some(page) = self.take_page() else { return Ok(()) };
            let written = self.engine.write_page(page, content);
            let next = written.is_ok().then(|| self.pool.publish(page, prefix, &tokens)).flatten();
            let Some(next) = next else {
                self.pool.release(page);
                return written;
            };
            pages.push(page);
            prefix = next;
        }
        Ok(())
    }

    /// Releases pages from the last to the first, so that a prefix is lost from its end.
    fn release_prefix(&mut self, pages: Vec<PageId>) {
        pages.into_iter().rev().for_each(|page| self.pool.release(page));
    }

    fn check_saveable(&self) -> Result<()> {
        if self.is_recurrent() {
            return Err(StateError::Damaged { what: "recurrent states cannot be saved by prefix" }.into());
        }
        if self.windows.is_some() {
            let what = "windows with pages of their own cannot be saved; set cache_ram";
            return Err(StateError::Damaged { what }.into());
        }
        Ok(())
    }

    /// What a saved prefix begins with: pages fit only the same model and the same type of the KV cache.
    fn prefix_header(&self) -> Vec<u8> {
        let engine = &self.options.engine;
        let mut header = Vec::with_capacity(MAGIC.len() + 2 + IDENTITY_BYTES + 16);
        header.extend(MAGIC);
        header.extend(format!("{VERSION:02}").into_bytes());
        header.extend(self.engine.model().identity());
        header.extend(engine.cache_keys.id().to_le_bytes());
        header.extend(engine.cache_values.id().to_le_bytes());
        header.extend((self.engine.page_bytes() as u64).to_le_bytes());
        header
    }
}
