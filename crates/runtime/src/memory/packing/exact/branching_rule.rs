//! The order in which branches are tried. No rule is best for all problems; together they solve most.

/// At which section to branch next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SectionRule {
    /// The one with the fewest branches; of these the one with the most unplaced bytes.
    #[default]
    FewestBranches,
    /// The one with the least slack.
    Tightest,
    /// The one with the smallest product of branches and niche width.
    Narrowest,
    /// The one with the lowest skyline.
    Lowest,
}

/// Which item to try first there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ItemRule {
    #[default]
    Longest,
    Largest,
    Smallest,
    Shortest,
    /// The one whose sections have the most unplaced bytes.
    Crowded,
}

/// A branching rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BranchingRule {
    pub(super) at: SectionRule,
    pub(super) first: ItemRule,
}

const fn rule(at: SectionRule, first: ItemRule) -> BranchingRule {
    BranchingRule { at, first }
}

/// The rules, in the order of the restarts.
pub(super) const RULES: [BranchingRule; 12] = [
    rule(SectionRule::FewestBranches, ItemRule::Longest),
    rule(SectionRule::FewestBranches, ItemRule::Largest),
    rule(SectionRule::FewestBranches, ItemRule::Shortest),
    rule(SectionRule::Tightest, ItemRule::Smallest),
    rule(SectionRule::Narrowest, ItemRule::Longest),
    rule(SectionRule::Lowest, ItemRule::Crowded),
    rule(SectionRule::Tightest, ItemRule::Largest),
    rule(SectionRule::FewestBranches, ItemRule::Smallest),
    rule(SectionRule::Tightest, ItemRule::Shortest),
    rule(SectionRule::Narrowest, ItemRule::Shortest),
    rule(SectionRule::Tightest, ItemRule::Longest),
    rule(SectionRule::Lowest, ItemRule::Longest),
];
