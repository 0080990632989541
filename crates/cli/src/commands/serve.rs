//! `quadriga serve`: answers requests over HTTP, with the interfaces of OpenAI, Anthropic, Ollama and llama-server.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use quadriga_llm::GeneratorOptions;
use quadriga_server::{App, Keys, Limits, ModelRegistry, PlanPictures, ServedModel, Server};
use quadriga_view::Picture;

use crate::answer::AnswerOptions;
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::serving_options::ServingOptions;

/// Heading of the help text.
const SERVER: &str = "Server options";

/// Arguments of `quadriga serve`.
#[derive(clap::Args)]
pub(crate) struct ServeArgs {
    /// Address to listen at
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = SERVER)]
    host: String,
    /// Port to listen at, 0 for any free one
    #[arg(long, value_name = "N", default_value_t = 8080, help_heading = SERVER)]
    port: u16,
    /// Key that requests must have; may be repeated
    #[arg(long, value_name = "KEY", help_heading = SERVER)]
    api_key: Vec<String>,
    /// File with a key in each line, which tokens-per-minute=N and concurrent=N may follow; read again on SIGHUP
    #[arg(long, value_name = "FILE", help_heading = SERVER)]
    api_key_file: Option<PathBuf>,
    /// Name of the model in answers [default: the file's name without .gguf]
    #[arg(long, short = 'a', value_name = "NAME", help_heading = SERVER)]
    alias: Option<String>,
    #[command(flatten)]
    serving: ServingOptions,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// Serves until it is told to stop.
pub(crate) fn serve(arguments: &ServeArgs) -> Outcome {
    let keys = Keys::new(arguments.api_key.clone(), arguments.api_key_file.clone());
    let keys = keys.map_err(Failure::Usage)?;
    let address = address(&arguments.host, arguments.port)?;
    if !address.ip().is_loopback() && keys.count() == 0 {
        note!(
            "quadriga: WARNING: everybody who reaches {} can use this server; --api-key KEY or --api-key-file FILE asks for a key",
            address.ip()
        );
    }
    let served = load(arguments)?;
    let name = served.name.clone();
    let app = App::new(ModelRegistry::with(served), keys, Limits::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build();
    let runtime = runtime.map_err(|error| Failure::Message(format!("cannot start threads: {error}")))?;
    runtime.block_on(async {
        let server = Server::bind(app, address)
            .await
            .map_err(|error| Failure::Message(format!("cannot listen at {address}: {error}")))?;
        let address = server.address().unwrap_or(address);
        if !arguments.model.quiet {
            note!("quadriga: {name} is served at http://{address} (Ctrl-C ends it)");
        }
        let (_stop, stopped) = Server::stop_handle();
        server.run(stopped).await;
        Ok(())
    })
}

/// Loads the model.
fn load(arguments: &ServeArgs) -> Outcome<ServedModel> {
    let options = arguments.answer.generator(&arguments.model)?;
    let (opened, opening) = arguments.model.open()?;
    let batching = arguments.serving.batcher(&opened, options.engine.clone())?;
    let mut prepared = arguments.model.place(opened, opening, &batching.engine)?;
    arguments.answer.set_template(&mut prepared)?;
    let options = GeneratorOptions {
        template_variables: arguments.answer.template_variables(&prepared.model),
        ..options
    };
    let name = arguments.alias.clone().unwrap_or_else(|| prepared.title());
    let picture = Picture::new(name.clone(), prepared.placed.forecast.explain());
    let pictures = PlanPictures { svg: picture.svg(), html: picture.html() };
    let (batcher, _) = prepared.batcher(batching)?;
    Ok(ServedModel::start(name, batcher, options, Some(pictures))?)
}

/// The address of a host's name or number.
fn address(host: &str, port: u16) -> Outcome<SocketAddr> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let found = (host, port).to_socket_addrs();
    let found = found.map_err(|error| Failure::Usage(format!("--host {host:?}: {error}")))?;
    found.into_iter().next().ok_or_else(|| Failure::Usage(format!("--host {host:?} has no address")))
}
