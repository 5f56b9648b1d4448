"""The words of tools/prove.py: promises, what is changed to try them, likely causes of a breach."""
PROMISES = dict(
    trained="what is trained moves, and what must survive is saved",
    noise="all noise has a name: (seed, iteration, slot, sample)",
    same="the same command gives the same bits",
    parts="micro-batches change no result",
    ranks="a run is the same on any number of ranks",
    padding="padding changes nothing",
    ids="padding is never read",
    evaluation="an evaluation changes nothing",
    resume="kill it anywhere, and the same command ends in the same bits",
    turns="with several turns the mask has gaps, and all this is true, too",
    long="longer runs do all this, too, and ZeRO does", lora="and LoRA does",
    order="a response does not depend on its place in the batch",
    score="a response with a higher score becomes likelier",
    kl="a larger kl_coef keeps the policy nearer to the reference",
    mask="losses and metrics see tokens that the policy sampled, and no others")
EXACT = "noise", "same", "evaluation", "resume"  # to the last bit; the others to rounding
NOTES = dict.fromkeys(["score", "kl"], "no promise, but what most algorithms want") | dict(
    order="no promise: trees, hints and the like give the responses of a group parts of their own",
    mask="no promise, but a rule of the house; right if you train on other tokens on purpose")
MAY_DIFFER = dict.fromkeys(["padding", "ids", "order"], "objective/texts") | dict(
    evaluation="eval/")  # metrics; objective/texts is a hash of all ids, of padding, too
PIECES = "micro_batch_size, rollout_batch_size, head_chunk"
CHANGED = dict(score="the score of one response, 3 higher and 3 lower; its log-prob behind it",
               kl="kl_coef, a hundredth of yours and ten times as much; the squared distance of a "
                  "token's log-probs from the reference at the end")
# errors by which a run itself refuses what breaks a promise
REFUSED = (r"run\.state|optimizer keeps|has a trained parameter|before any update|drifted apart|"
           "is not finite|the metric")
NEEDS = (  # of the fork, where a small run fails
    "the small run's models are GPT-2's of 16 numbers a token, whose tokens are bytes, its rows "
    "are {rows}, its batch_size is {batch}: if your own command does not end so, type what it "
    "needs of yours: --policy_path=FOLDER of a small model, --{path}=FILE, --batch_size=")
LOOKS = dict(  # what one run shows
    zero="the gradient of {name!r} is exactly 0 in an iteration's first step: a loss "
         "without gradient (old_logprobs without detach, a detach or no_grad too many, no "
         "advantage)",
    still="{name!r} is trained, and no weight of it has moved",
    lost="{count} {name} stand in columns where no token was sampled: GAE never sees them; "
         "last_real(mask) is the column of the last token",
    mask="{name} gets a mask that is True where the policy sampled nothing: response_mask is the "
         "one that counts",
    kl="objective/kl is exactly 0 in every iteration: the reference is the policy itself, or moves "
       "with it",
    sign="an optimizer that steps by a sign: where a gradient is 0 in theory, rounding decides; "
         "right if yours does")
CAUSES = {  # (a promise, what differs first): likely causes
    ("noise", ""): [
        "noise without a name: torch.rand, randperm, random, numpy: draw it from a Generator whose "
        "seed is a hash of (seed, iteration, ...), as permutation and response_uniforms do",
        "the order of a Python set, or hash() of a text: sort it, use hashlib",
        "torch.empty that is not filled before it is read; the time of day in a number"],
    ("same", ""): ["the time, a process id, an address (id()), or threads decide a number"],
    ("ranks", "died"): [
        "a collective (gather_rows, add_columns, all_reduce_metrics ...) that not all ranks reach: "
        "in an `if` on the rank, or on numbers that differ between ranks",
        "a metric that is in `sums` on one rank alone; a number that only rank 0 knows"],
    ("ranks", "gradient"): [
        "gradients that are not set to 0 before a step (zero_gradients), are reduced twice, or "
        "averaged, or clipped before all_reduce_gradients",
        "a number or column of this rank's rows alone in the loss; a count of them as normaliser"],
    ("ranks", "column"): [
        "a column that is filled in this rank's rows alone: add_columns, gather_rows",
        "a mean or deviation over this rank's share: take it over the whole batch"],
    ("ranks", "metric"): [
        "a metric that rank 0 measured on its own micro-batches: add_up(sums, m, ...), which "
        "all_reduce_metrics adds over the ranks"],
    ("parts", "gradient"): [
        "a loss that is divided by something of the micro-batch: m.sum(), len(mb), .mean(): divide "
        "by one count over all rows of the step, as token_count",
        "a statistic (mean, max, std, softmax) over the micro-batch, or noise that is drawn for it",
        "a name of the batch where the micro-batch's is meant (batch[...] for mb[...])"],
    ("parts", "metric"): [
        "a metric that is a mean of the micro-batches' means, or of the last micro-batch alone: "
        "add_up(sums, m, {...}) keeps sums and counts"],
    ("padding", ""): [
        "a mean, deviation, maximum or softmax over all T columns: the mask is forgotten "
        "(masked_sum, masked_mean, masked_whiten)",
        "a number divided by T, or by x.numel(), x.shape[1]",
        "the last column taken for the last token: last_real(mask)"],
    ("ids", ""): [
        "a mask or length made from ids (tokens != pad_id): padding may be an id of a text; use "
        "response_mask and lengths",
        "a column is read where response_mask is False; texts decoded from a whole row"],
    ("order", ""): [
        "a group cut the wrong way: the group_size responses to a prompt are side by side, so "
        ".view(-1, group_size)",
        "a number that goes from one response to the next; noise that is drawn by the place"],
    ("evaluation", ""): [
        "a running number that evaluate() changes, too: shape_scores and rollout are called there",
        "noise or a counter that training and evaluation share"],
    ("resume", ""): [
        "a number, list, tensor or generator that survives an iteration and is not in run.state "
        "(plain numbers, lists, dicts with text keys), run.also_saved or a model of `models`",
        "an optimizer or model that is not in `optimizers` and `models` before Run(...)"],
    ("kl", ""): ["the sign of the KL, in the reward or in the loss"],
    ("score", "none"): [
        "the score never reaches the loss: written past the mask, overwritten, or multiplied by 0",
        "old_logprobs without .detach(): then the ratio is the constant 1",
        "a .detach() or no_grad too many: the policy's loss has no gradient"],
    ("score", "wrong"): [
        "a sign: of the advantage, of the loss, or of the ratio",
        "advantages given to other rows than the scores came from",
        "a clip on the wrong side: min and max exchanged"]}
