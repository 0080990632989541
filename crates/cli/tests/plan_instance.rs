//! `quadriga plan --instance`: its report, and its errors for files that it cannot read.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::Write;

use crate::common::{CommandOutput, output, quadriga};
use serde_json::Value;

fn pack(text: &str, flags: &[&str]) -> CommandOutput {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    output(quadriga(["plan", "--instance"]).arg(file.path()).args(flags))
}

const SMALL: &str = "id,lower,upper,size\n0,0,2,4\n1,1,3,8\n\n2,2,4,4\n";

#[test]
fn reports_the_peak_as_lines_and_as_json() {
    for effort in ["fast", "search", "exact"] {
        let json = pack(SMALL, &["--effort", effort, "--capacity", "11", "--json"]).success().out;
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["n"], &json["lower_bound"], &json["peak"]), (&3.into(), &12.into(), &12.into()));
        assert_eq!((&json["ratio"], &json["proved_optimal"]), (&1.0.into(), &true.into()));
        assert_eq!((&json["capacity"], &json["fits"]), (&11.into(), &false.into()));
    }
    let text = pack(SMALL, &["--capacity", "12"]).success().out;
    assert!(text.contains("peak           12\n") && text.contains("fits           true\n"), "{text}");
    let json: Value = serde_json::from_str(&pack(SMALL, &["--json"]).success().out).unwrap();
    assert!(json.get("fits").is_none(), "{json}");
}

#[test]
fn columns_may_come_in_any_order() {
    let text = pack("size, upper,name,lower\n7,5,x,3\n2,6,y,4\n", &[]).success().out;
    assert!(text.contains("peak           9\n"), "{text}");
}

#[test]
fn errors_name_line_and_column() {
    for (text, part) in [
        ("id,lower,size\n", "line 1: no column `upper`"),
        ("", "no column `lower`"),
        ("id,lower,upper,size\n0,0,1,8\n1,0,x,8\n", "line 3, column `upper`: `x`"),
        ("id,lower,upper,size\n0,0,1\n", "line 2, column `size`: missing"),
        ("id,lower,upper,size\n0,0,1,-8\n", "line 2, column `size`: `-8`"),
        ("id,lower,upper,size\n0,0,5000000000,8\n", "line 2, column `upper`"),
        ("id,lower,upper,size\n\n0,0,1,8\n1,4,4,8\n", "line 4: item 1"),
        ("id,lower,upper,size\n0,0,1,18446744073709551615\n", "line 2: item 0"),
    ] {
        pack(text, &[]).failed(1, &[part]);
    }
    output(&mut quadriga(["plan", "--instance", "no/such/file"])).failed(1, &["cannot read no/such/file"]);
}
