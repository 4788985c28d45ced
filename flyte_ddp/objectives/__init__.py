"""What training minimises and evaluations measure, one file each; derive your own from one, or from Objective."""

from flyte_ddp.objectives.classification import Classification
from flyte_ddp.objectives.language import Language
from flyte_ddp.objectives.multilabel import Multilabel
from flyte_ddp.objectives.objective import HIGHER, LOWER, Facts, Objective
from flyte_ddp.objectives.regression import Regression
from flyte_ddp.objectives.segmentation import Segmentation

__all__ = ["HIGHER", "LOWER", "Classification", "Facts", "Language", "Multilabel", "Objective", "Regression"]
__all__ += ["Segmentation"]
