"""Ten AdamW steps of the case `tied` of gpt2.py, in f64, with layers that are added between steps.

Writes growth.json beside itself: for each step the layers that are added before it (what each is a
copy of, and whether its residual branches end in zeros), loss and gradient norm; and at the end the
sum of absolute values of each layer's weights. An added layer's AdamW states begin at zero.

    pip install torch transformers && python growth.py
"""

import copy

import torch

from depth import RATE, loss_of_step, parameter_groups, tied_model, write_golden

STEPS = 10
ADDED = {2: [(0, False), (1, False)], 5: [(3, True)], 7: [(1, False)]}


def main():
    model = tied_model()
    layers = model.transformer.h
    optimizer = torch.optim.AdamW(parameter_groups(list(model.named_parameters())), lr=RATE)
    steps = []
    for step in range(STEPS):
        added = ADDED.get(step, [])
        first_new = len(layers)
        for source, zero_residual in added:
            new = copy.deepcopy(layers[source])
            if zero_residual:
                for module in (new.attn.c_proj, new.mlp.c_proj):
                    torch.nn.init.zeros_(module.weight)
                    torch.nn.init.zeros_(module.bias)
            layers.append(new)
        for new in layers[first_new:]:
            for group in parameter_groups(list(new.named_parameters())):
                optimizer.add_param_group(group)
        loss = loss_of_step(model, step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        added = [dict(copy_of=source, zero_residual=zero) for source, zero in added]
        steps.append(dict(added=added, loss=loss.item(), norm=norm.item()))
    write_golden("growth.json", layers, steps)


if __name__ == "__main__":
    main()
