//! Revisions: branches, tags and commits in the cache.

use std::fs;

use quadriga_models::hub::{Hub, HubError};

use super::fake_hub::{COMMIT, FakeHub};
use super::{MODEL, bytes, name, open, pull, settings};

const FIRST: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const BRANCH: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

/// A hub whose revisions have one file in common.
fn hub_with_revisions() -> FakeHub {
    let (common, own) = (bytes(2_000), bytes(3_000));
    let fake = FakeHub::new(&[
        (MODEL, "m-Q4_0.gguf", &common),
        (MODEL, "m-Q8_0.gguf", &bytes(1_000)),
        ("org/first", "m-Q4_0.gguf", &common),
        ("org/first", "m-Q8_0.gguf", &own),
    ]);
    fake.add_revision(MODEL, "v1", FIRST, "org/first");
    fake.add_revision(MODEL, "refs/pr/1", BRANCH, "org/first");
    fake
}

fn commit_of(hub: &Hub, text: &str) -> Option<String> {
    hub.cache().find(&name(text)).unwrap().map(|model| model.commit)
}

#[test]
fn a_revision_is_removed_and_others_stay() {
    let (fake, folder) = (hub_with_revisions(), tempfile::tempdir().unwrap());
    let hub = open(settings(&fake, folder.path()));
    let at = |revision: &str| format!("{MODEL}@{revision}");
    pull(&hub, MODEL).unwrap();
    pull(&hub, &at("v1")).unwrap();
    let cache = hub.cache();
    assert!(matches!(cache.remove(&name(&at("v2"))), Err(HubError::NotCached { .. })));
    // The content that only this revision has.
    assert_eq!(cache.remove(&name(&at("v1"))).unwrap(), 3_000);
    let left: Vec<_> = cache.models().unwrap().into_iter().map(|model| (model.commit, model.quant)).collect();
    assert_eq!(left, [(COMMIT.to_owned(), "Q4_0".to_owned()), (COMMIT.to_owned(), "Q8_0".to_owned())]);
    assert!(cache.models().unwrap().iter().all(|model| fs::read(&model.files[0].path).is_ok()));
    assert_eq!(commit_of(&hub, &at("v1")), None);
    assert!(matches!(cache.remove(&name(&at("v1"))), Err(HubError::NotCached { .. })));
    // By the first digits of its commit, which a list shows; and one type of it.
    pull(&hub, &at("v1")).unwrap();
    assert_eq!(commit_of(&hub, &at("aaaaaaaa")).as_deref(), Some(FIRST));
    assert_eq!(cache.remove(&name(&format!("{}:Q8_0", at("aaaaaaaa")))).unwrap(), 3_000);
    assert_eq!(commit_of(&hub, &format!("{}:Q4_0", at("v1"))).as_deref(), Some(FIRST));
    // What main means is main's.
    assert_eq!(cache.remove(&name(&at("main"))).unwrap(), 1_000);
    assert_eq!(cache.models().unwrap().len(), 1);
    assert_eq!(cache.remove(&name(MODEL)).unwrap(), 2_000);
    assert!(!folder.path().join("hub").join(MODEL).exists());
}

#[test]
fn a_commit_stays_while_a_revision_is_at_it() {
    let (fake, folder) = (hub_with_revisions(), tempfile::tempdir().unwrap());
    fake.add_revision(MODEL, "stable", FIRST, "org/first");
    let hub = open(settings(&fake, folder.path()));
    let [first, stable] = ["v1", "stable"].map(|revision| format!("{MODEL}@{revision}"));
    pull(&hub, &first).unwrap();
    pull(&hub, &stable).unwrap();
    assert_eq!(hub.cache().remove(&name(&first)).unwrap(), 0);
    assert_eq!((commit_of(&hub, &first), commit_of(&hub, &stable).as_deref()), (None, Some(FIRST)));
    assert_eq!(hub.cache().remove(&name(&stable)).unwrap(), 5_000);
    assert!(hub.cache().models().unwrap().is_empty());
}

#[test]
fn a_name_without_revision_is_not_another_revision() {
    let (fake, folder) = (hub_with_revisions(), tempfile::tempdir().unwrap());
    let hub = open(settings(&fake, folder.path()));
    for revision in ["v1", "refs/pr/1"] {
        pull(&hub, &format!("{MODEL}@{revision}")).unwrap();
        assert_eq!(commit_of(&hub, MODEL), None, "{revision}");
    }
    assert_eq!(commit_of(&hub, &format!("{MODEL}@refs/pr/1")).as_deref(), Some(BRANCH));
    pull(&hub, MODEL).unwrap();
    assert_eq!(commit_of(&hub, MODEL).as_deref(), Some(COMMIT));
    // What main was before is still used for what it has.
    let newer = "cccccccccccccccccccccccccccccccccccccccc";
    fake.add("org/newer", "m-Q2_K.gguf", &bytes(500));
    fake.add_revision(MODEL, "main", newer, "org/newer");
    pull(&hub, MODEL).unwrap();
    assert_eq!(commit_of(&hub, MODEL).as_deref(), Some(newer));
    assert_eq!(commit_of(&hub, &format!("{MODEL}:Q4_0")).as_deref(), Some(COMMIT));
    for wrong in ["v2", "refs/pr/2"] {
        let error = pull(&hub, &format!("{MODEL}@{wrong}")).unwrap_err();
        assert!(
            matches!(&error, HubError::RevisionNotFound { repository, revision } if repository == MODEL && revision == wrong),
            "{error}"
        );
    }
    // Each model of the list is found under its name there.
    for model in hub.cache().models().unwrap() {
        let revision = model.revision.as_ref().map(|revision| format!("@{revision}")).unwrap_or_default();
        assert_eq!(revision.is_empty(), model.commit == newer, "{model:?}");
        let found =
            hub.cache().find(&name(&format!("{}{revision}:{}", model.repository, model.quant))).unwrap();
        assert_eq!(found.unwrap().files, model.files);
    }
}
