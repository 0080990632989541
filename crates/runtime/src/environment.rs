//! The environment variables that the crate reads; each has an equivalent in a builder.

/// Environment variable that has every plan checked with the value `1`, and none with `0`.
/// [`Scheduler::check_plans`](crate::Scheduler::check_plans) overrides it.
pub const CHECK_PLANS_VARIABLE: &str = "QUADRIGA_CHECK_PLANS";

/// Whether plans are checked, as far as the environment says.
pub(crate) fn check_plans() -> bool {
    match std::env::var(CHECK_PLANS_VARIABLE).as_deref() {
        Ok("0") => false,
        Ok(value) if !value.is_empty() => true,
        _ => cfg!(debug_assertions),
    }
}
