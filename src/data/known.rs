//! Which tokens and classes a model knows.

use super::reader::Reader;

impl Reader {
    /// Refuses tokens that the tokenizer has and the model does not.
    pub(super) fn check_known(&self, tokens: &[u32]) -> Result<(), String> {
        self.vocabulary.check(tokens, self.tokens)
    }

    /// The class that a number means. If a class has a number for its name, numbers are names;
    /// otherwise they count the classes from 0. So a label means the same in each format, whether
    /// the format has numbers or only text.
    pub(super) fn class_of_number(&self, number: f64) -> Result<i32, String> {
        let classes = self.classes;
        let named = |name: &String| name.parse::<f64>().ok().filter(|named| named.is_finite());
        if !self.names.iter().any(|name| named(name).is_some()) {
            let class = (0..classes).find(|&class| class as f64 == number);
            return class.map(|class| class as i32).ok_or_else(|| no_class(number, classes));
        }
        let class = self.names.iter().position(|name| named(name) == Some(number));
        class.map(|class| class as i32).ok_or_else(|| {
            let names = self.names.join(", ");
            format!(
                "label {number} is none of {names}: a class has a number for its name, so labels \
                 that are numbers are names, too"
            )
        })
    }
}

pub(super) fn no_class(label: impl std::fmt::Display, classes: usize) -> String {
    format!("label {label} is none of the {classes} classes, which count from 0")
}
