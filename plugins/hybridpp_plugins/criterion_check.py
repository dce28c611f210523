"""What is known of a model's criteria, and what is refused: losses that are neither means nor sums over items."""

from hybridpp.cluster import Group, gather_objects, get_dist_logger
from hybridpp.errors import ConfigError
from hybridpp.pipeline import CriterionAdapter, LossComparison, LossReduction, no_items
from hybridpp.pipeline.loss_form import ADVICE

_WAYS_OUT = (
    "With num_microbatches=1 and one replica any loss is right. Else let the criterion say what it is: "
    "criterion.num_items(inputs) counts what the mean is over (criterion.num_items = lambda inputs: "
    '(inputs["labels"] != -100).sum(), for example), '
    'criterion.reduction = "mean" averages what micro-batches give as it is (usual for load-balancing losses; '
    "boost(..., loss_reduction='mean') where reduction is an argument of the criterion's class), "
    "criterion.coupled = True gives it the outputs of all replicas. See docs/losses.md."
)


class CriterionCheck:
    """What is known of a model's criteria, and what is wrong with the one of the current step.

    Attributes:
        reduction: what is wrong in the current step, if this rank computes losses.
        comparison: of the step's losses with the one whose form is known.
    """

    def __init__(self) -> None:
        self.comparison = LossComparison()
        self.reduction = LossReduction.MEAN
        self._criterion: CriterionAdapter | None = None
        self._words = ""
        self._warned: set[LossReduction] = set()

    def begin(self, criterion: CriterionAdapter) -> None:
        """A step begins, in which the loss of a criterion is looked at."""
        self.reduction, self._words, self._criterion = LossReduction.MEAN, "", criterion

    def report(self, reduction: LossReduction, words: str) -> None:
        """Note what is wrong."""
        if reduction > self.reduction:
            self.reduction, self._words = reduction, words

    def share_words(self, control: Group) -> None:
        """Let every rank know the reason, which only ranks that compute losses have. Collective: all ranks."""
        found = gather_objects(control, "at the end of a step whose loss is refused", self._words)
        self._words = next(filter(None, found), "")

    def raise_or_warn(self, reduction: LossReduction, model: str) -> None:
        """Raise or warn about the finding of any rank, on every rank.

        Raises:
            ConfigError: the mean of the losses of micro-batches would depend on their number.
            DataError: no replica's batch has an item.
        """
        words, self._words, self.reduction = self._words, "", LossReduction.MEAN
        if self._criterion is not None and reduction > LossReduction.SUM_IN_MODEL:
            self._criterion.forget_forms()  # it is looked at again if the script goes on
        because = f" ({words})" if words else ""
        if reduction is LossReduction.SUM:
            raise ConfigError(
                "the criterion returns a sum over samples without declaring it: for twice the samples it returned "
                "twice "
                "the loss, and the mean of such losses depends on num_microbatches. Pass loss_reduction='sum' "
                "to boost, or set criterion.reduction = 'sum' (functions have attributes, too), or return the mean."
            )
        if reduction is LossReduction.COUPLED:
            raise ConfigError(
                f"the loss is neither a mean nor a sum over items{because}, so it depends on num_microbatches and on "
                f"the number of replicas. {_WAYS_OUT} If an output of the model holds no samples, but as many "
                "numbers as there are samples (weights of levels, prototypes), say so, as in "
                "HybridParallelPlugin(output_dims=(0, None))."
            )
        if reduction is LossReduction.UNCOUNTED:
            raise ConfigError(
                f"what the loss is a mean over cannot be counted from a batch{because}, so micro-batches cannot be "
                f"weighted before their backward passes. {_WAYS_OUT}"
            )
        if reduction is LossReduction.OF_EARLIER_STAGE:
            raise ConfigError(
                "a part of the loss is made of a single number, or a few, that a stage before the last one makes of a "
                "micro-batch (as an auxiliary loss of a block), so what it is a mean over is not seen where the loss "
                "is made, and the loss may depend on num_microbatches and on the number of replicas. Let the block "
                "return a number for each sample (a mean over its tokens), of which the model takes the mean where it "
                'makes the loss: that is right in any layout. Or set criterion.reduction = "mean" (functions have '
                "attributes, too), which counts the number by samples: right for a mean over them, and usual for "
                "load-balancing losses. Or use pp_size=1, or num_microbatches=1 with one replica. See docs/losses.md."
            )
        if reduction is LossReduction.KEPT:
            raise ConfigError(
                f"the loss depends on what the criterion keeps from call to call ({words}): it is called once for "
                "each micro-batch, on each replica, so what it keeps changes more often than once a step, or on each "
                "replica by its own samples. Let it only read that, and change it between steps: for example "
                "criterion.step += 1, or a running mean of what execute_pipeline returns. "
                'criterion.reduction = "mean" (functions have attributes, too) takes the losses as they are; '
                "with num_microbatches=1 and one replica any loss is right. See docs/losses.md."
            )
        if reduction is LossReduction.CHANGED:
            raise ConfigError(
                "the loss is made in another way than in the criterion's first step, or in unlike ways by the "
                "replicas: it is reduced by another function, or divided by another number, and micro-batches and "
                "replicas were weighted by what it was a mean over then. Pass another function as criterion from this "
                "step on: what its loss is a mean over is found anew; of a loss that the model makes, too. If a term "
                f"was left out until now, because it had no items: {ADVICE}. {_WAYS_OUT}"
            )
        if reduction is LossReduction.APPEARED:
            raise ConfigError(
                "the loss of a micro-batch has a term that the one from which it was found what the loss is a mean "
                "over had not, so the term's items were not counted. If it is left out where it has none, "
                f"{ADVICE}: then it is counted in every micro-batch. {_WAYS_OUT}"
            )
        if reduction is LossReduction.EMPTY:
            raise no_items()
        if reduction in self._warned:
            return
        self._warned.add(reduction)
        if reduction is LossReduction.STATISTICS:
            text = (
                f"{model} applies a statistic of all samples of a micro-batch to each of them{because}, as batch "
                "normalisation does, so its loss depends on num_microbatches and on the number of replicas. If it must "
                "not, let the statistic be of each sample, or use num_microbatches=1 and one replica. Set "
                "criterion.reduction = 'mean' to disable this warning."
            )
        else:
            text = (
                f"the loss that {model} computes ends with a sum{because}, and it is averaged over micro-batches and "
                "replicas. "
                "If it is a sum over samples, set criterion.reduction = 'sum'; otherwise set 'mean', which disables "
                "this warning."
            )
        get_dist_logger().warning(text, ranks=[0])
