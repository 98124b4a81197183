"""Nothing wrong: padded sentences in dicts, half precision, accumulation, clipping, a frozen part, an average of weights."""
import copy
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return {"words": torch.arange(3 + index % 4) + index, "label": index % 2, "name": f"text {index}"}


def collate(texts):
    words = nn.utils.rnn.pad_sequence([t["words"] for t in texts], batch_first=True)
    return {"words": words, "mask": words > 0, "label": torch.tensor([t["label"] for t in texts])}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(64, 8), nn.BatchNorm1d(8).requires_grad_(False)
        self.attend, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2)
        self.unused = nn.Linear(3, 3)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, words, mask):
        x = self.attend(self.words(words), src_key_padding_mask=~mask)
        x = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.norm(x.float()))


start()
model = DistributedDataParallel(Model().train(), find_unused_parameters=True)
average = copy.deepcopy(model.module).requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100)
texts = Texts()
sampler = DistributedSampler(texts)
loader = DataLoader(texts, batch_size=4, sampler=sampler, collate_fn=collate, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for step, batch in enumerate(loader):
        is_last = step % 2 == 1
        with nullcontext() if is_last else model.no_sync(), torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(batch["words"], batch["mask"]), batch["label"])
            (loss / 2).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            for slow, fast in zip(average.parameters(), model.module.parameters()):
                slow.lerp_(fast.detach(), 0.1)
