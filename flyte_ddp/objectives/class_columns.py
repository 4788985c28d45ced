"""Names and values of columns with a value for each class."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from flyte_ddp.core.objectives.table_columns import TableColumns


def make_unique_column_names(prefix: str, names: Iterable[str]) -> list[str]:
    """Return a column name, ``<prefix>_<name>``, for each name. Repeated column names get a "'" at the end."""
    found = dict[str, None]()  # in order, and quick to search
    for name in names:
        column = f"{prefix}_{name}"
        while column in found:
            column += "'"
        found[column] = None
    return [*found]


def make_top_columns(prefix: str, value: str, names: Sequence[str], values: Tensor, ranks: Tensor) -> TableColumns:
    """Return columns with the best classes of each sample, by rank: the class's name and value.

    The columns are ``<prefix>top_<rank>`` for names and ``<prefix><value>_top_<rank>`` for values.

    Args:
        prefix: Start of the columns' names.
        value: Name of the values in the columns' names.
        names: The names.
        values: A value of each name, [n, names].
        ranks: Position in ``names`` at each rank, [n, k].
    """
    found: TableColumns = {}
    columns = zip(ranks.T.tolist(), values.gather(1, ranks).T.tolist(), strict=True)
    for rank, (places, numbers) in enumerate(columns, 1):
        found |= {f"{prefix}top_{rank}": [names[place] for place in places], f"{prefix}{value}_top_{rank}": numbers}
    return found
