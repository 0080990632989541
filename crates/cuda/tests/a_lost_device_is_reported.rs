//! A device that is lost: every use says so, and none hangs. The device is lost in a process of its own. Says so and
//! passes where there is no device.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::process::Command;
use std::sync::Arc;

use quadriga_graph::{DType, GraphBuilder};
use quadriga_runtime::{Backend, BackendError, RuntimeError, Scheduler, Usage};

const CHILD: &str = "QUADRIGA_TEST_LOSES_ITS_DEVICE";

#[test]
fn everything_says_that_the_device_is_lost() {
    if std::env::var_os(CHILD).is_some() {
        lose();
        return;
    }
    if let Err(reason) = quadriga_cuda::Backend::new(0) {
        println!("skipped, there is no GPU: {reason}");
        return;
    }
    let test = std::env::current_exe().unwrap();
    let status = Command::new(test).env(CHILD, "1").status().unwrap();
    assert!(status.success());
}

fn lose() {
    let backend = Arc::new(quadriga_cuda::Backend::new(0).unwrap());
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [256]).tanh());
    let graph = g.finish().unwrap();
    let plan = Scheduler::new([Arc::clone(&backend) as Arc<dyn Backend>]).plan(&graph).unwrap();
    let mut session = plan.session().unwrap();
    session.run(&[("x", &vec![0.5f32; 256])]).unwrap();

    assert!(matches!(backend.lose(), BackendError::Lost { .. }));
    let error = session.run(&[("x", &vec![0.5f32; 256])]).unwrap_err();
    let RuntimeError::Device { error, .. } = error else { panic!("{error}") };
    assert!(matches!(*error, BackendError::Lost { .. }), "{error}");
    assert!(matches!(backend.allocate(1024, Usage::State), Err(BackendError::Lost { .. })));
}
