//! The model of a repository that a name stands for.

use std::path::Path;

use quadriga_models::hub::{ChosenModel, HubError, HubResult};

use super::fake_hub::FakeHub;
use super::{MODEL, bytes, name, open, settings};

#[test]
fn a_type_that_a_repository_lacks_means_the_largest_that_fits() {
    let folder = tempfile::tempdir().unwrap();
    let fake = FakeHub::new(&[
        (MODEL, "m-F16.gguf", &bytes(4_000)),
        (MODEL, "m-Q8_0.gguf", &bytes(2_000)),
        (MODEL, "m-Q4_0.gguf", &bytes(1_000)),
        ("org/text", "README.md", b"#"),
    ]);
    let hub = open(settings(&fake, folder.path()));
    let choose = |text: &str, most: u64| -> HubResult<ChosenModel> {
        let name = name(text);
        let listing = hub.list(&name)?;
        // The file without weights has the size of the model.
        let mut fits = |outline: &Path| Ok(outline.metadata().unwrap().len() <= most);
        hub.choose::<HubError>(&name, &listing, &mut fits)
    };
    let quant = |text: &str, most: u64| choose(text, most).unwrap().model.quant;
    assert_eq!((quant(MODEL, 9_000), quant(MODEL, 1_500)), ("Q8_0".to_owned(), "Q4_0".to_owned()));
    // A type that is there is taken, whether it fits or not.
    assert_eq!(quant("org/model-GGUF:f16", 0), "F16");
    let chosen = choose("org/model-GGUF:Q2_K", 1_500).unwrap();
    assert_eq!((chosen.model.quant.as_str(), chosen.missing.as_deref()), ("Q4_0", Some("Q2_K")));
    let warning = chosen.warning(&name("org/model-GGUF:Q2_K")).unwrap();
    assert!(warning.contains("has no Q2_K, only F16, Q8_0, Q4_0: Q4_0 is taken"), "{warning}");
    assert_eq!(choose(MODEL, 1_500).unwrap().warning(&name(MODEL)), None);
    for text in [MODEL, "org/model-GGUF:Q2_K"] {
        let error = choose(text, 10).unwrap_err();
        assert!(matches!(&error, HubError::NothingFits { smallest, .. } if smallest == "Q4_0"), "{error}");
    }
    assert!(matches!(choose("org/text:Q8_0", 9_000), Err(HubError::NoModel { .. })));
}
