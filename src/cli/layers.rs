//! Resolves the config: file < environment < flags. Each value keeps its origin, so an error can
//! say where a bad value was written, and which key an unknown one was probably meant to be.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use l2l::config::LoraConfig;
use l2l::{Config, Error};
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use super::other_names;

/// The place where a value was written.
#[derive(Clone, Debug, PartialEq)]
enum Origin {
    /// The config of a run without a config file.
    BuiltIn {
        line: usize,
    },
    File {
        path: PathBuf,
        line: usize,
    },
    Variable {
        name: String,
        text: String,
    },
    Flag(String),
}

impl Origin {
    /// The rank of its layer. The value of the highest layer wins.
    fn layer(&self) -> u8 {
        match self {
            Origin::BuiltIn { .. } | Origin::File { .. } => 0,
            Origin::Variable { .. } => 1,
            Origin::Flag(_) => 2,
        }
    }

    /// The text of a value from a variable or a flag.
    fn text(&self) -> Option<&str> {
        match self {
            Origin::BuiltIn { .. } | Origin::File { .. } => None,
            Origin::Variable { text, .. } => Some(text),
            Origin::Flag(flag) => flag.split_once('=').map(|(_, value)| value.trim()),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::BuiltIn { line } => write!(f, "built-in config, line {line}"),
            Origin::File { path, line } => write!(f, "{}, line {line}", path.display()),
            Origin::Variable { name, .. } => write!(f, "environment {name}"),
            Origin::Flag(text) => write!(f, "{text}"),
        }
    }
}

/// The prefix of our environment variables: `L2L__STEP__BATCH` is `step.batch`.
const PREFIX: &str = "L2L__";

/// Values by key, each from the highest layer that has it.
pub(super) struct Layers {
    values: BTreeMap<String, (Value, Origin)>,
    known: Vec<String>,
}

impl Layers {
    pub(super) fn new() -> Layers {
        Layers { values: BTreeMap::new(), known: known_keys() }
    }

    /// Adds the values of a file.
    pub(super) fn file(&mut self, path: &Path) -> Result<(), Error> {
        let refuse =
            |what: &dyn fmt::Display| refused(format_args!("config {}: {what}", path.display()));
        let text = fs::read_to_string(path).map_err(|error| refuse(&error))?;
        self.text(path, &text)
    }

    /// Adds the values of a file that was already read.
    pub(super) fn text(&mut self, path: &Path, text: &str) -> Result<(), Error> {
        self.lines(text, |line| Origin::File { path: path.into(), line })
    }

    /// Adds the values of the built-in config.
    pub(super) fn built_in(&mut self, text: &str) -> Result<(), Error> {
        self.lines(text, |line| Origin::BuiltIn { line })
    }

    fn lines(&mut self, text: &str, origin: impl Fn(usize) -> Origin) -> Result<(), Error> {
        let bad = |error: toml::de::Error| {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            refused(format_args!("config {}: {}", origin(line), error.message()))
        };
        let values: Table = toml::from_str(text).map_err(bad)?;
        let spans = DeTable::parse(text).map_err(bad)?;
        let mut flat = Vec::new();
        flatten("", &values, spans.get_ref(), &mut flat);
        for (key, value, at) in flat {
            self.set(&key, value, origin(line_of(text, at)))?;
        }
        Ok(())
    }

    /// Adds the values of the environment.
    pub(super) fn environment(
        &mut self,
        variables: impl Iterator<Item = (String, String)>,
    ) -> Result<(), Error> {
        for (name, text) in variables {
            if let Some(key) = name.strip_prefix(PREFIX) {
                let key = key.to_lowercase().replace("__", ".");
                self.set(&key, parse(&text), Origin::Variable { name, text })?;
            }
        }
        Ok(())
    }

    /// Adds the value of `--set key=value`. `--set key=` gives a key its default back, and
    /// `--set section=` all keys of a section.
    pub(super) fn flag(&mut self, text: &str) -> Result<(), Error> {
        let Some((key, value)) = text.split_once('=') else {
            return Err(refused(format_args!(
                "--set {text}: write key=value, for example step.batch=8"
            )));
        };
        let key = key.trim();
        let value = value.trim();
        let origin = Origin::Flag(format!("--set {text}"));
        let section = format!("{key}.");
        if value.is_empty() && self.known.iter().any(|known| known.starts_with(&section)) {
            self.values.retain(|known, _| known != key && !known.starts_with(&section));
            return Ok(());
        }
        self.set(key, parse(value), origin)?;
        if value.is_empty() {
            self.values.remove(key);
        }
        Ok(())
    }

    /// Adds the value of a flag that has a key of its own, such as `--format`.
    pub(super) fn own_flag(&mut self, flag: &str, key: &str, value: Option<String>) {
        if let Some(value) = value {
            let value = if value == "true" { Value::Boolean(true) } else { Value::String(value) };
            self.values.insert(key.into(), (value, Origin::Flag(flag.into())));
        }
    }

    fn set(&mut self, key: &str, value: Value, origin: Origin) -> Result<(), Error> {
        let in_table =
            |table: &str| Some((table.len(), key.strip_prefix(table)?.strip_prefix('.')?));
        if let Some((end, name)) = TABLES.into_iter().find_map(in_table) {
            let table = key[..end].to_string();
            let entry = self.values.entry(table).or_insert_with(|| (Table::new().into(), origin));
            if let Value::Table(table) = &mut entry.0 {
                table.insert(name.into(), value);
            }
            return Ok(());
        }
        if self.known.iter().any(|known| known == key) {
            // Steps and epochs both set the length of a run: the higher layer wins.
            let other = match key {
                "step.epochs" => "step.steps",
                "step.steps" => "step.epochs",
                _ => "",
            };
            let is_earlier = |found: &Origin| found.layer() < origin.layer();
            if self.values.get(other).is_some_and(|(_, found)| is_earlier(found)) {
                self.values.remove(other);
            }
            self.values.insert(key.into(), (value, origin));
            return Ok(());
        }
        let section = format!("{key}.");
        let keys: Vec<&str> =
            self.known.iter().filter_map(|known| known.strip_prefix(&section)).collect();
        let what = if !keys.is_empty() {
            format!("{key} is a section: its keys are {}", keys.join(", "))
        } else if let Some((own, note)) = other_names::key_of(key) {
            let note = if note.is_empty() { String::new() } else { format!(" ({note})") };
            format!("unknown key {key}: it is {own} here{note}")
        } else if let Some(near) = nearest(key, &self.known) {
            format!("unknown key {key}: did you mean {near}?")
        } else {
            format!("unknown key {key}: `l2l config reference` lists them")
        };
        Err(refused(format_args!("{origin}: {what}")))
    }

    /// Makes the config: all values over the defaults.
    pub(super) fn config(&self) -> Result<Config, Error> {
        let mut all = Table::new();
        for (key, (value, _)) in &self.values {
            let (sections, key) = key.rsplit_once('.').expect("known keys have a section");
            let place = sections.split('.').fold(&mut all, |place, section| {
                let section = place.entry(section).or_insert_with(|| Table::new().into());
                section.as_table_mut().expect("sections are tables")
            });
            place.insert(key.into(), value.clone());
        }
        let mut read = serde_path_to_error::deserialize(Value::Table(all.clone()));
        // A value that parsed as a number may be meant as text.
        while let Err(error) = &read {
            let key = error.path().to_string();
            let text = self.values.get(&key).and_then(|(_, origin)| origin.text());
            let Some(text) = text else { break };
            let mut parts = key.split('.');
            let first = parts.next().expect("a key has a section");
            let value = parts.fold(&mut all[first], |place, part| &mut place[part]);
            if value.is_str() {
                break;
            }
            *value = Value::String(text.into());
            match serde_path_to_error::deserialize(Value::Table(all.clone())) {
                Err(again) if again.path().to_string() == key => break,
                next => read = next,
            }
        }
        let config: Config = read.map_err(|error| {
            let key = error.path().to_string();
            let text = error.inner().to_string();
            let what = plain(text.lines().next().unwrap_or_default());
            // The elements of an array have the origin of the array.
            let whole = key.split('[').next().unwrap_or(&key);
            let at = self.origin(whole);
            refused(format_args!("{at}{whole}: {what}"))
        })?;
        config.check().map_err(|error| self.locate(error))?;
        // The default micro-batch shrinks to the batch; one that the user gave is checked.
        let batch = config.sequences();
        let micro_batch = config.step.micro_batch;
        if self.is_given("step.micro_batch") && micro_batch > batch {
            let problem = format_args!(
                "is {micro_batch}, and step.batch is {}: a step has no more sequences, so set \
                 it to at most {batch}",
                config.step.batch
            );
            return Err(self.locate(Error::Config {
                key: "step.micro_batch".into(),
                problem: problem.to_string(),
            }));
        }
        Ok(config)
    }

    /// True if a file, the environment or a flag gave a key a value; false for the built-in config.
    pub(super) fn is_given(&self, key: &str) -> bool {
        let given = |(_, origin): &(Value, Origin)| !matches!(origin, Origin::BuiltIn { .. });
        self.values.get(key).is_some_and(given)
    }

    fn origin(&self, key: &str) -> String {
        self.values.get(key).map(|(_, origin)| format!("{origin}: ")).unwrap_or_default()
    }

    /// Adds the place where a key was written to an error about that key.
    pub(super) fn locate(&self, error: Error) -> Error {
        match error {
            Error::Config { key, problem } => {
                refused(format_args!("{}{key} {problem}", self.origin(&key)))
            }
            error => error,
        }
    }
}

/// Replaces Rust's words for types in a message.
fn plain(message: &str) -> String {
    const WORDS: [(&str, &str); 7] = [
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected usize", "expected a whole number"),
        ("expected u64", "expected a whole number"),
        ("expected u32", "expected a whole number"),
        ("expected a sequence", "expected a list in brackets"),
        ("unknown variant", "unknown value"),
    ];
    WORDS.iter().fold(message.to_string(), |text, (word, plain)| text.replace(word, plain))
}

fn refused(what: impl fmt::Display) -> Error {
    Error::Argument(what.to_string())
}

fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|&byte| byte == b'\n').count() + 1
}

/// Collects the leaves of a table: key, value and offset in the text.
fn flatten(
    prefix: &str,
    values: &Table,
    spans: &DeTable<'_>,
    flat: &mut Vec<(String, Value, usize)>,
) {
    for (key, spanned) in spans.iter() {
        let name = format!("{prefix}{}", key.get_ref());
        let at = Spanned::span(key).start;
        match (&values[key.get_ref().as_ref()], spanned.get_ref()) {
            // An empty table that is not a section is a value of the wrong type.
            (Value::Table(values), DeValue::Table(spans))
                if !TABLES.contains(&&*name) && (is_section(&name) || !values.is_empty()) =>
            {
                flatten(&format!("{name}."), values, spans, flat);
            }
            (value, _) => flat.push((name, value.clone(), at)),
        }
    }
}

/// True if a section has this name.
fn is_section(name: &str) -> bool {
    let all = serde_json::to_value(Config::default()).expect("a config is plain data");
    all.get(name).is_some_and(serde_json::Value::is_object)
}

/// Parses a value as TOML; anything else is text.
fn parse(text: &str) -> Value {
    let line = toml::from_str::<Table>(&format!("value = {text}")).ok();
    let value = line.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
    value.unwrap_or_else(|| Value::String(text.into()))
}

/// A section that is absent by default, and present once it is named.
const OPTIONAL: &str = "train.lora";

/// Keys whose values are tables with names of the user's own.
const TABLES: [&str; 3] = ["model.prompts", "train.lora.alpha_pattern", "train.lora.rank_pattern"];

/// All keys, with their sections.
pub(super) fn known_keys() -> Vec<String> {
    let mut config = Config::default();
    config.train.lora = Some(LoraConfig::default());
    let all = serde_json::to_value(config).expect("a config is plain data");
    let mut keys: Vec<String> = TABLES.into_iter().chain([OPTIONAL]).map(String::from).collect();
    list_keys("", &all, &mut keys);
    keys
}

fn list_keys(prefix: &str, values: &serde_json::Value, keys: &mut Vec<String>) {
    for (key, value) in values.as_object().into_iter().flatten() {
        let name = format!("{prefix}{key}");
        match value {
            serde_json::Value::Object(_) => list_keys(&format!("{name}."), value, keys),
            _ => keys.push(name),
        }
    }
}

/// The known key that is most similar to a wrong one, which may lack its section.
fn nearest<'k>(key: &str, known: &'k [String]) -> Option<&'k String> {
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_string();
    let likeness = |known: &&String| {
        let whole = strsim::jaro_winkler(key, known);
        let end = strsim::jaro_winkler(&last(key), &last(known));
        // Between keys with similar ends, the one of the same section is nearer.
        let section = f64::from(key.split('.').next() == known.split('.').next());
        whole.max(0.97 * end + 0.03 * section)
    };
    let best = known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&best) > 0.75).then_some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_layers_win() {
        let mut layers = Layers::new();
        layers
            .text(Path::new("run.toml"), "[step]\nbatch = 3\nmicro_batch = 1\nseed = 1\nsteps = 9")
            .expect("good");
        let variables = [("L2L__STEP__MICRO_BATCH", "2"), ("L2L__STEP__SEED", "2"), ("HOME", "x")];
        let variables = variables.map(|(name, value)| (name.to_string(), value.to_string()));
        layers.environment(variables.into_iter()).expect("good");
        layers.flag("step.seed=3").expect("good");
        layers.flag("data.train = some file.txt").expect("good");
        layers.flag("metrics.run = 2024").expect("good");
        layers.flag("step.epochs = 2").expect("good");
        let config = layers.config().expect("good");
        assert_eq!((config.step.batch, config.step.micro_batch, config.step.seed), (3, 2, 3));
        assert!(config.data.train.is("some file.txt"));
        assert_eq!(config.metrics.run.as_deref(), Some("2024"));
        assert_eq!((config.step.steps, config.step.epochs), (None, Some(2.0)));
        layers.flag("step.seed=").expect("good");
        layers.flag("metrics.run=").expect("good");
        let config = layers.config().expect("good");
        assert_eq!((config.step.seed, config.metrics.run), (0, None));
        layers.flag("step.sed=").expect_err("not a key");
    }

    /// Names in a table of the user's own are no keys. A layer sets one of them, or the table.
    #[test]
    fn tables_have_names_of_the_users_own() {
        let mut layers = Layers::new();
        let file = "[train.lora.rank_pattern]\nq_proj = 2\n\"layers.3\" = 4";
        layers.text(Path::new("run.toml"), file).expect("good");
        layers.flag("train.lora.rank_pattern.layers.0.mlp=6").expect("good");
        layers.flag("train.lora.alpha_pattern={q_proj = 1.5}").expect("good");
        let lora = layers.config().expect("good").train.lora.expect("it is named");
        let ranks = [("layers.0.mlp", 6), ("layers.3", 4), ("q_proj", 2)];
        let ranks = ranks.map(|(name, rank)| (name.to_string(), rank));
        assert_eq!(lora.rank_pattern, Some(ranks.into()));
        assert_eq!(lora.alpha_pattern, Some([("q_proj".to_string(), 1.5)].into()));
        layers.flag("train.lora.rank_pattern=").expect("good");
        assert_eq!(layers.config().expect("good").train.lora.expect("named").rank_pattern, None);
        layers.flag("train.lora.rank_pattern.q_proj=0").expect("a number");
        let error = layers.config().expect_err("no rank").to_string();
        assert!(error.contains("train.lora.rank_pattern must be a table of ranks"), "{error}");
    }

    /// Texts of a file, each with a part of the error.
    const FILES: [(&str, &str); 15] = [
        (
            "[step]\nbatch = 4\nmicro_batch = 8",
            "run.toml, line 3: step.micro_batch is 8, and step.batch is 4",
        ),
        ("lr = 1", "unknown key lr: it is optimizer.learning_rate here"),
        ("[step]\nbach = 3", "run.toml, line 2: unknown key step.bach: did you mean step.batch?"),
        ("\n\nstep.batch = 0", "run.toml, line 3: step.batch must be at least 1"),
        ("[step]\nbatch = \"x\"", "line 2: step.batch: invalid type: string \"x\""),
        ("[optimizer]\nbetas = [0.9, \"b\"]", "run.toml, line 2: optimizer.betas: "),
        (
            "learning_rate = 1",
            "line 1: unknown key learning_rate: did you mean optimizer.learning_rate?",
        ),
        ("[stp]\nbatch = 1", "line 2: unknown key stp.batch: did you mean step.batch?"),
        ("step = 3", "step is a section: its keys are batch"),
        ("[step\n", "run.toml, line 1: "),
        ("[bogus]", "run.toml, line 1: unknown key bogus"),
        ("[validation.more]", "line 1: unknown key validation.more"),
        ("step.batch = {}", "line 1: step.batch: invalid type: map"),
        ("step = { steps = 1, epochs = 1 }", "line 1: step.epochs is set together"),
        ("device.memory = -1", "device.memory: invalid value: integer `-1`, expected \"auto\""),
    ];

    const VARIABLES: [(&str, &str, &str); 2] = [
        ("L2L__STEP__BATCH", "0", "environment L2L__STEP__BATCH: step.batch must be"),
        ("L2L__STEPS", "1", "environment L2L__STEPS: unknown key steps: did you mean step.steps?"),
    ];

    const FLAGS: [(&str, &str); 3] = [
        ("lora.r=8", "--set lora.r=8: unknown key lora.r: it is train.lora.rank"),
        ("optimizer.kind=adagrad", "=adagrad: optimizer.kind: unknown value `adagrad`"),
        ("step.batch", "--set step.batch: write key=value"),
    ];

    #[test]
    fn errors_say_where_and_what_was_meant() {
        let check = |add: &dyn Fn(&mut Layers) -> Result<(), Error>, says: &str| {
            let mut layers = Layers::new();
            let config = add(&mut layers).and_then(|()| layers.config());
            let error = config.expect_err("a bad one").to_string();
            assert!(error.contains(says), "{says:?} expected in: {error}");
        };
        for (text, says) in FILES {
            check(&|layers| layers.text(Path::new("run.toml"), text), says);
        }
        for (name, text, says) in VARIABLES {
            check(&|layers| layers.environment([(name.into(), text.into())].into_iter()), says);
        }
        for (flag, says) in FLAGS {
            check(&|layers| layers.flag(flag), says);
        }
    }
}
