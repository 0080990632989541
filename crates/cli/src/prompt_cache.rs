//! `--prompt-cache`: the KV cache of a prompt in a file.

use std::path::PathBuf;

use quadriga_llm::Generator;

use crate::atomic_file::AtomicFile;
use crate::failure::Outcome;
use crate::ranks;

/// Options of the prompt cache.
#[derive(clap::Args)]
pub(crate) struct PromptCacheOptions {
    /// Keep the KV cache of the prompt in a file: the longest common prefix of the next prompt is not computed again.
    /// Delete the file when weights of the model were edited: models are told apart by samples of each tensor
    #[arg(long, value_name = "FILE", help_heading = PROMPT)]
    prompt_cache: Option<PathBuf>,
    /// Keep the KV cache of the answer, too; chat always does
    #[arg(long, requires = "prompt_cache", help_heading = PROMPT)]
    prompt_cache_all: bool,
    /// Use the prompt cache without updating it
    #[arg(long, requires = "prompt_cache", help_heading = PROMPT)]
    prompt_cache_ro: bool,
}

/// Heading of the help text.
const PROMPT: &str = "Generation options";

impl PromptCacheOptions {
    /// An error if the file cannot be written after the answer: found out before the model is loaded.
    pub(crate) fn check(&self) -> Outcome {
        // The first rank reads and writes the parts of all.
        let written = self.prompt_cache.as_ref().filter(|_| !self.prompt_cache_ro && !ranks::follows());
        let Some(path) = written else { return Ok(()) };
        match std::fs::metadata(path) {
            // What is no file is an error when it is loaded.
            Ok(metadata) if !metadata.is_file() => Ok(()),
            // The temporary file goes at once.
            _ => AtomicFile::create(path).map(drop),
        }
    }

    /// Loads the file. One that does not exist or is empty will be written later.
    pub(crate) fn load(&self, generator: &mut Generator) -> Outcome {
        let Some(path) = &self.prompt_cache else { return Ok(()) };
        match std::fs::metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Ok(metadata) if metadata.is_file() && metadata.len() == 0 => Ok(()),
            _ => Ok(generator.engine_mut().load_state_file(0, path)?),
        }
    }

    /// Saves the KV cache after an answer to a prompt of so many tokens, unless the file has the prompt already.
    pub(crate) fn save_prompt(&self, generator: &mut Generator, prompt: usize, cached: usize) -> Outcome {
        if !self.prompt_cache_all {
            if cached + 1 >= prompt {
                return Ok(());
            }
            // A model that forgets may be able to keep a part of the prompt only.
            generator.engine_mut().truncate(0, prompt);
        }
        self.save(generator)
    }

    /// Saves the whole KV cache.
    pub(crate) fn save(&self, generator: &mut Generator) -> Outcome {
        match &self.prompt_cache {
            Some(path) if !self.prompt_cache_ro => Ok(generator.engine_mut().save_state_file(0, path)?),
            _ => Ok(()),
        }
    }
}
