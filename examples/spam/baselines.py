"""What spam takes without a network: the majority, and logistic regression on bags of words.

    pip install scikit-learn && python examples/spam/baselines.py DIRECTORY

Reads what fetch.py wrote: the same text that the encoder is given. Tried are counts, presence and
tf-idf of words and marks, alone and in pairs, each with the regularisation that suits it; those
that do best in five-fold cross-validation on train.jsonl are reported on test.jsonl, which nothing
else looks at. Folds are stretches of train.jsonl, where emails that are alike lie side by side.
"""

import json
import pathlib
import sys

from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import Pipeline

WORDS = r"\w+|[^\w\s]"  # marks count too: spam is fond of them
BAGS = {
    "counts": (CountVectorizer(token_pattern=WORDS), [0.1, 0.3, 1.0]),
    "presence": (CountVectorizer(token_pattern=WORDS, binary=True), [0.3, 1.0, 3.0]),
    "presence, pairs": (
        CountVectorizer(token_pattern=WORDS, binary=True, ngram_range=(1, 2), min_df=2),
        [0.3, 1.0, 3.0]),
    "tf-idf": (TfidfVectorizer(token_pattern=WORDS, sublinear_tf=True), [30, 100, 300]),
    "tf-idf, pairs": (
        TfidfVectorizer(token_pattern=WORDS, sublinear_tf=True, ngram_range=(1, 2), min_df=2),
        [100, 300, 1000, 3000]),
}


def load(path):
    lines = [json.loads(line) for line in path.open()]
    return [line["text"] for line in lines], [line["label"] == "spam" for line in lines]


def main():
    directory = pathlib.Path(sys.argv[1])
    texts, labels = load(directory / "train.jsonl")
    test_texts, test_labels = load(directory / "test.jsonl")
    spam = sum(labels) > len(labels) / 2
    majority = sum(label == spam for label in test_labels) / len(test_labels)
    print(f"majority {majority:.4f}", flush=True)
    folds = StratifiedKFold(5)
    best = {}
    for name, (bag, strengths) in BAGS.items():
        model = Pipeline([("bag", bag), ("regression", LogisticRegression(solver="liblinear"))])
        search = GridSearchCV(model, {"regression__C": strengths}, cv=folds, n_jobs=2)
        search.fit(texts, labels)
        print(f"{name}: {search.best_score_:.4f} in cross-validation, "
              f"C = {search.best_params_['regression__C']}", flush=True)
        kind = "words and pairs of them" if "pairs" in name else "words"
        if kind not in best or search.best_score_ > best[kind].best_score_:
            best[kind] = search
    for kind, search in best.items():
        accuracy = search.score(test_texts, test_labels)
        print(f"bag of {kind}: {accuracy:.4f} on {len(test_labels)} held out")


if __name__ == "__main__":
    main()
