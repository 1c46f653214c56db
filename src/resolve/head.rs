//! The head of the model that a config names: what the model predicts.

use super::sentence::embedding;
use crate::config::{Config, Labels, ModelConfig, Task};
use crate::error::Error;
use crate::hf;
use crate::kernels::ProblemType;
use crate::models::{Head, Shape, families};

/// The task of a model with this head.
fn task_of(head: Head) -> Task {
    match head {
        Head::Tokens => Task::CausalLm,
        Head::Masked => Task::MaskedLm,
        Head::Classes { .. } => Task::SequenceClassification,
        Head::TokenClasses { .. } => Task::TokenClassification,
        Head::Embedding { .. } => Task::SentenceEmbedding,
    }
}

/// The head for the config's task.
///
/// # Errors
/// The model's family cannot do this task, or the number of labels is out of range.
pub(super) fn head(config: &Config, shape: &Shape) -> Result<Head, Error> {
    let model = &config.model;
    let reads_scores = config.objective.score_record().is_some();
    let tokens = if shape.causal { Head::Tokens } else { Head::Masked };
    let labels = match shape.head {
        Head::Classes { labels, .. } | Head::TokenClasses { labels } => labels,
        _ if reads_scores || model.problem_type == Some(ProblemType::Regression) => 1,
        Head::Tokens | Head::Masked | Head::Embedding { .. } => 2,
    };
    let own = match config.objective.reads_embeddings() {
        true => Task::SentenceEmbedding,
        false if reads_scores => Task::SequenceClassification,
        false => task_of(shape.head),
    };
    // An encoder scores masked tokens behind a transform, and classes behind another.
    let has = |module: &str| shape.causal || !module.is_empty();
    let scores_tokens = has(shape.names.transform);
    let classes = has(shape.names.class_dense) && !shape.names.class_out.is_empty();
    let token_classes = has(shape.names.class_dense) && !shape.names.token_classes.is_empty();
    let labels = model.labels.as_ref().map_or(labels, Labels::count);
    let task = model.task.unwrap_or(own);
    check_task_keys(model, task)?;
    let head = match task {
        Task::SentenceEmbedding => return embedding(config, shape),
        Task::SequenceClassification if classes && reads_scores => {
            check_one_score(config, labels)?;
            Head::Classes { labels: 1, problem: ProblemType::Regression }
        }
        Task::SequenceClassification if classes => {
            let problem = problem_type(config, shape.head, labels)?;
            Head::Classes { labels, problem }
        }
        Task::TokenClassification if token_classes => Head::TokenClasses { labels },
        task if scores_tokens && task == task_of(tokens) => return Ok(tokens),
        task => {
            let mut tasks = Vec::new();
            tasks.extend(scores_tokens.then_some(task_of(tokens)));
            tasks.extend(classes.then_some(Task::SequenceClassification));
            tasks.extend(token_classes.then_some(Task::TokenClassification));
            tasks.push(Task::SentenceEmbedding);
            let tasks: Vec<&str> = tasks.into_iter().map(Task::name).collect();
            let task = task.name();
            let tasks = tasks.join(" or ");
            let family = shape.names.family;
            return Err(Error::config(
                "model.task",
                format_args!("is {task:?}: models of the family {family} can only do {tasks}"),
            ));
        }
    };
    if !(1..=1 << 20).contains(&labels) {
        let problem = format_args!("is {labels}: it must be 1 to 1048576");
        return Err(Error::config("model.labels", problem));
    }
    Ok(head)
}

/// Refuses a head that an objective on one score cannot have.
fn check_one_score(config: &Config, labels: usize) -> Result<(), Error> {
    if labels != 1 {
        let problem = format_args!(
            "is {labels}, and objective.kind is a loss of one score of each sequence: set 1"
        );
        return Err(Error::config("model.labels", problem));
    }
    match config.model.problem_type.filter(|problem| *problem != ProblemType::Regression) {
        Some(problem) => Err(Error::config(
            "model.problem_type",
            format_args!(
                "is {:?}, and objective.kind is a loss of one score of each sequence: leave it out",
                problem.name()
            ),
        )),
        None => Ok(()),
    }
}

/// Refuses keys of another task.
fn check_task_keys(model: &ModelConfig, task: Task) -> Result<(), Error> {
    let keys = [
        ("model.problem_type", model.problem_type.is_some(), Task::SequenceClassification),
        ("model.pooling", model.pooling.is_some(), Task::SentenceEmbedding),
        ("model.normalise", model.normalise.is_some(), Task::SentenceEmbedding),
        ("model.include_prompt", model.include_prompt.is_some(), Task::SentenceEmbedding),
        ("model.default_prompt", model.default_prompt.is_some(), Task::SentenceEmbedding),
        ("model.prompts", !model.prompts.is_empty(), Task::SentenceEmbedding),
    ];
    match keys.into_iter().find(|(_, is_set, of)| *is_set && task != *of) {
        None => Ok(()),
        Some((key, _, of)) => {
            let of = of.name();
            let task = task.name();
            let problem = format_args!(
                "is for {of}, and the task is {task:?}: leave it out, or set model.task"
            );
            Err(Error::config(key, problem))
        }
    }
}

/// What a head of sequences with `labels` scores predicts: as the config says, else as the model's
/// `config.json` says, else by the number of scores.
///
/// # Errors
/// It is not known, or not built for this number of scores.
fn problem_type(config: &Config, own: Head, labels: usize) -> Result<ProblemType, Error> {
    if let Some(problem) = config.model.problem_type {
        if problem.fits(labels) {
            return Ok(problem);
        }
        let name = problem.name();
        return Err(Error::config(
            "model.problem_type",
            format_args!(
                "is {name:?} of {labels} labels: regression has model.labels = 1, and a class is \
                 one of at least 2"
            ),
        ));
    }
    // Adapters that bring a head say what it predicts.
    if let Head::Classes { labels: of_own, problem } = own
        && of_own == labels
        && config.train.lora.as_ref().is_some_and(|lora| lora.path.is_some())
    {
        return Ok(problem);
    }
    let usual = ProblemType::of_labels(labels);
    let Some(path) = &config.model.path else { return Ok(usual) };
    let source = hf::read_config(path)?;
    let keys = source.as_object().cloned().unwrap_or_default();
    match families::problem_type(&keys, labels) {
        Err(what) if matches!(own, Head::Classes { labels: of_own, .. } if of_own == labels) => {
            Err(Error::bad_model(path.join("config.json").display(), what))
        }
        written => Ok(written.unwrap_or(usual)),
    }
}
