//! Backends are listed and opened by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use quadriga::graph::{DType, GraphBuilder};
use quadriga::runtime::{Backend, Scheduler};
use quadriga::{Family, OpenError, Reason, Registry};

/// Two devices, of which the second does not work.
struct Mine;

impl Family for Mine {
    fn name(&self) -> &str {
        "mine"
    }

    fn count(&self) -> Result<u32, Reason> {
        Ok(2)
    }

    fn open(&self, number: u32) -> Result<Arc<dyn Backend>, Reason> {
        match number {
            0 => Ok(Arc::new(quadriga::cpu::Backend::builder().threads(1).build()?)),
            _ => Err("it is on fire".into()),
        }
    }
}

struct Nothing;

impl Family for Nothing {
    fn name(&self) -> &str {
        "npu"
    }

    fn count(&self) -> Result<u32, Reason> {
        Err("no driver".into())
    }

    fn open(&self, _: u32) -> Result<Arc<dyn Backend>, Reason> {
        Err("no driver".into())
    }
}

#[test]
fn a_backend_opened_by_name_runs_a_graph() {
    let registry = Registry::with_threads(Some(2));
    assert_eq!(registry.names()[0], "cpu");
    for name in ["cpu:0", "cpu:1", "CPU:"] {
        assert!(matches!(registry.open(name), Err(OpenError::Unknown { .. })), "{name}: there is only one");
    }
    for name in ["cpu", "CPU"] {
        let backend = registry.open(name).unwrap();
        assert_eq!(backend.name(), "cpu");
        let g = GraphBuilder::new();
        g.output("y", g.input("x", DType::F32, [2]).sqr());
        let mut session = Scheduler::new(backend).plan(g.finish().unwrap()).unwrap().session().unwrap();
        session.run(&[("x", &[2.0f32, 3.0])]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), [4.0, 9.0]);
    }
}

#[test]
fn own_kinds_are_listed_and_opened_like_the_others() {
    let registry = Registry::empty().register(Mine).register(Nothing);
    assert_eq!(registry.names(), ["mine:0", "mine:1"]);
    assert!(registry.open("mine").is_ok() && registry.open("Mine:0").is_ok());
    let (open, unusable) = registry.open_all();
    assert_eq!(open.len(), 1);
    let reasons: Vec<String> = unusable.iter().map(|u| format!("{}: {}", u.name, u.reason)).collect();
    assert_eq!(reasons, ["mine:1: it is on fire", "npu: no driver"]);
    // The one that was added last replaces the first.
    assert_eq!(registry.register(Mine).names().len(), 2);
}

#[test]
fn errors_list_the_names_of_this_machine() {
    let registry = Registry::empty().register(Mine).register(Nothing);
    for name in ["gpu", "mine:", "mine:x", "mine:-1", "mine:+1", "mine:0:0", ""] {
        let error = registry.open(name).unwrap_err();
        assert!(matches!(error, OpenError::Unknown { .. }), "{name}");
        assert_eq!(
            error.to_string(),
            format!("there is no device \"{name}\"; this machine has mine:0, mine:1")
        );
    }
    let error = registry.open("mine:1").unwrap_err();
    assert_eq!(error.to_string(), "mine:1 cannot be used: it is on fire; this machine has mine:0, mine:1");
    let error = registry.open("npu").unwrap_err();
    assert!(error.to_string().starts_with("npu:0 cannot be used: no driver"), "{error}");
    let error = Registry::default().open("cpu:3").unwrap_err();
    assert!(matches!(error, OpenError::Unknown { .. }), "{error}");
}

#[cfg(feature = "sim")]
#[test]
fn simulated_devices_have_any_number() {
    let registry = Registry::default();
    assert!(registry.names().contains(&"sim:0".to_owned()));
    for (name, expected) in [("sim", "sim:0"), ("SIM:3", "sim:3")] {
        assert_eq!(registry.open(name).unwrap().name(), expected);
    }
}
