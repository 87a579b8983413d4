"""Sequences: language models, translation, tagging."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from zoo.scripts import Result, noise, ported, script, state, whole_numbers

WORDS = 17


class RNNModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(WORDS, 8), nn.LSTM(8, 12, 2, batch_first=True)
        self.decoder = nn.Linear(12, WORDS)

    def forward(self, tokens: torch.Tensor, hidden: Any) -> Any:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden


@script("LSTM language model, the hidden state detached and carried on; no loader, `data[i : i + bptt]`")
def lstm_without_loader(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = RNNModel()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = ported(team, model, optimizer)[:2]
    text, bptt = whole_numbers(WORDS, 4, 25), 6
    printed = []
    for _ in range(2):
        hidden: Any = None
        for start in range(0, 24, bptt):
            tokens, targets = text[:, start : start + bptt], text[:, start + 1 : start + 1 + bptt]
            optimizer.zero_grad()
            if hidden is not None:
                hidden = tuple(part.detach() for part in hidden)
            output, hidden = model(tokens, hidden)
            loss = F.cross_entropy(output.reshape(-1, WORDS), targets.reshape(-1))
            loss.backward()
            printed.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)))
            optimizer.step()
            printed.append(loss.item())
    return state(model), printed


@script("LSTM language model with a loader, the hidden state carried on from batch to batch")
def lstm(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = RNNModel()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    text = whole_numbers(WORDS, 24, 7)
    loader: Any = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, drop_last=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    printed = []
    for _ in range(2):
        hidden: Any = None
        for tokens, targets in loader:
            optimizer.zero_grad()
            if hidden is not None:
                hidden = tuple(part.detach() for part in hidden)
            output, hidden = model(tokens, hidden)
            F.cross_entropy(output.reshape(-1, WORDS), targets.reshape(-1)).backward()
            printed.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)))
            optimizer.step()
    return state(model), printed


class TransformerModel(nn.Module):
    """As in pytorch/examples/word_language_model, batch first."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width, self.embed = width, nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, WORDS)
        self.register_buffer("places", torch.sin(torch.arange(40.0).view(40, 1) / torch.arange(1.0, width + 1)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.get_default_dtype())
        x = self.embed(tokens) * math.sqrt(self.width) + self.places[: tokens.shape[1]]  # type: ignore[index]
        return F.log_softmax(self.decoder(self.encoder(x, mask=mask, is_causal=True)), dim=-1)


@script("`nn.TransformerEncoder` with a causal mask, warm-up by `LambdaLR`, perplexity on a second loader", within=1e-7)
def transformer(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = TransformerModel()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98), eps=1e-9)
    text = whole_numbers(WORDS, 28, 9)
    loader: Any = DataLoader(TensorDataset(text[:20, :-1], text[:20, 1:]), batch_size=8, shuffle=True)
    test: Any = DataLoader(TensorDataset(text[20:, :-1], text[20:, 1:]), batch_size=8)
    model, optimizer, loader, test = ported(team, model, optimizer, loader, test)
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) ** -0.5, (step + 1) * 3**-1.5))
    criterion, printed = nn.NLLLoss(), []
    for _ in range(2):
        model.train()
        for tokens, targets in loader:
            optimizer.zero_grad()
            criterion(model(tokens).view(-1, WORDS), targets.reshape(-1)).backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for tokens, targets in test:
                total += len(tokens) * criterion(model(tokens).view(-1, WORDS), targets.reshape(-1)).item()
        printed.append(math.exp(total / len(test.dataset)))
    return state(model), printed


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.c_proj(y)
        result: torch.Tensor = x + self.mlp(self.ln_2(x))
        return result


class GPT(nn.Module):
    """Tied embeddings; `forward(tokens, targets)` gives logits and loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(16, width)
        self.h, self.ln_f = nn.ModuleList(Block(width, 2) for _ in range(2)), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.reshape(-1), ignore_index=-1)


def gpt_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


@script("nanoGPT's loop: `get_batch` without a loader, accumulation, clipping, a rate set by hand, `estimate_loss`")
def nanogpt(team: Any) -> Result:
    torch.manual_seed(1337)
    text = whole_numbers(WORDS, 200)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - 8, (4,))
        x = torch.stack([text[i : i + 8] for i in starts])
        return x, torch.stack([text[i + 1 : i + 9] for i in starts])

    model: Any = GPT()
    optimizer: Any = torch.optim.AdamW(gpt_groups(model), lr=1e-2, betas=(0.9, 0.95))
    model, optimizer = ported(team, model, optimizer)[:2]
    accumulation, printed = 2, []
    x, y = get_batch()
    for iteration in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (iteration + 1) / 4
        if iteration % 2 == 0:
            model.eval()
            with torch.no_grad():
                losses = torch.tensor([model(*get_batch())[1].item() for _ in range(2)])
            printed.append(losses.mean().item())
            model.train()
        for _ in range(accumulation):
            _, loss = model(x, y)
            loss = loss / accumulation
            x, y = get_batch()
            loss.backward()
        printed.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return state(model), printed


@script("nanoGPT's loop with a loader, the loss from `model(x, y)`, no accumulation")
def gpt_with_loader(team: Any) -> Result:
    torch.manual_seed(1337)
    text = whole_numbers(WORDS, 28, 9)
    model: Any = GPT()
    optimizer: Any = torch.optim.AdamW(gpt_groups(model), lr=1e-2, betas=(0.9, 0.95))
    loader: Any = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    printed = []
    for _ in range(2):
        for x, y in loader:
            _, loss = model(x, y)
            loss.backward()
            printed.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return state(model), printed


def padded(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = pad_sequence(batch, batch_first=True, padding_value=0)
    return {"tokens": tokens[:, :-1], "labels": torch.where(tokens[:, 1:] == 0, -100, tokens[:, 1:])}


@script("causal LM on padded sentences, batches that are dicts, `ignore_index=-100`: a mean over tokens")
def padded_lm(team: Any) -> Result:
    torch.manual_seed(0)
    sentences = [1 + whole_numbers(WORDS - 1, 4 + 3 * number % 7, seed=number) for number in range(20)]
    model: Any = GPT()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(sentences, batch_size=8, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            logits, _ = model(batch["tokens"])
            loss = F.cross_entropy(logits.reshape(-1, WORDS), batch["labels"].reshape(-1), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return state(model), []


class T5(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = torch.full((target.shape[1], target.shape[1]), float("-inf")).triu(1)
        memory = self.encoder(self.shared(source))
        result: torch.Tensor = self.lm_head(self.decoder(self.shared(target), memory, tgt_mask=mask))
        return result


@script("encoder and decoder with one tied embedding, label smoothing, padding ignored")
def t5(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = T5()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=5e-3)
    targets = whole_numbers(WORDS, 20, 7, seed=3)
    targets[5:9, 4:] = 0
    loader: Any = DataLoader(TensorDataset(whole_numbers(WORDS, 20, 5), targets), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
    for _ in range(2):
        for source, target in loader:
            optimizer.zero_grad()
            logits = model(source, target[:, :-1])
            criterion(logits.reshape(-1, WORDS), target[:, 1:].reshape(-1)).backward()
            optimizer.step()
    return state(model), []


@script("Adafactor, which looks at rows and columns")
def adafactor(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = GPT()
    optimizer: Any = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    text = whole_numbers(WORDS, 20, 9)
    loader: Any = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        model(x, y)[1].backward()
        optimizer.step()
    return state(model), []


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(WORDS, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        attended, _ = self.attend(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.norm(x + attended).masked_fill(padding.unsqueeze(-1), 0.0)
        result: torch.Tensor = self.out(x.sum(1) / (~padding).sum(1, keepdim=True))
        return result


@script("`nn.MultiheadAttention` with a padding mask, batches with masks")
def attention_masks(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = Classifier()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    padding = torch.arange(6).expand(20, 6) > 1 + whole_numbers(5, 20, 1)
    data = TensorDataset(whole_numbers(WORDS, 20, 6), padding, whole_numbers(3, 20))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for tokens, mask, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens, mask), label).backward()
            optimizer.step()
    return state(model), []


def bagged(batch: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0] + [len(text) for text, _ in batch[:-1]])
    return torch.cat([text for text, _ in batch]), lengths.cumsum(0), torch.tensor([label for _, label in batch])


class BagClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.EmbeddingBag(WORDS, 8), nn.Linear(8, 3)

    def forward(self, text: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(self.embedding(text, offsets))
        return result


@script("`nn.EmbeddingBag` with offsets: a batch is one long text, as in torchtext's tutorial")
def embedding_bag(team: Any) -> Result:
    torch.manual_seed(0)
    texts = [(whole_numbers(WORDS, 3 + 2 * number % 5, seed=number), number % 3) for number in range(20)]
    model: Any = BagClassifier()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=bagged)  # type: ignore[arg-type]
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for text, offsets, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(text, offsets), label).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return state(model), []


class SkipGram(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.center, self.context = nn.Embedding(WORDS, 8, sparse=sparse), nn.Embedding(WORDS, 8, sparse=sparse)

    def forward(self, center: torch.Tensor, context: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        u = self.center(center)
        near = F.logsigmoid((u * self.context(context)).sum(1))
        far = F.logsigmoid(-(self.context(negative) @ u.unsqueeze(2)).squeeze(2)).sum(1)
        return -(near + far).mean()


def train_skip_gram(team: Any, sparse: bool) -> Result:
    torch.manual_seed(0)
    model: Any = SkipGram(sparse)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    words = TensorDataset(
        whole_numbers(WORDS, 28), whole_numbers(WORDS, 28, seed=3), whole_numbers(WORDS, 28, 4, seed=4)
    )
    loader: Any = DataLoader(words, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for center, context, negative in loader:
        optimizer.zero_grad()
        loss = model(center, context, negative)
        loss.backward()
        optimizer.step()
    return state(model), []


@script("word2vec with negative samples; the model's result is the loss")
def skip_gram(team: Any) -> Result:
    return train_skip_gram(team, sparse=False)


@script("word2vec with `nn.Embedding(sparse=True)`")
def sparse_embeddings(team: Any) -> Result:
    return train_skip_gram(team, sparse=True)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, 6), nn.GRU(6, 5, bidirectional=True, batch_first=True)
        self.out = nn.Linear(10, 4)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])
        result: torch.Tensor = self.out(output)
        return result


@script("a bidirectional GRU on packed sequences, a loss over tokens by a mask: `(loss * mask).sum() / mask.sum()`")
def packed_tagger(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = Tagger()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(whole_numbers(WORDS, 20, 6), 1 + whole_numbers(6, 20, seed=8), whole_numbers(4, 20, 6, seed=9))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for _ in range(2):
        for tokens, lengths, tags in loader:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(tokens, lengths).transpose(1, 2), tags, reduction="none")
            mask = (torch.arange(6) < lengths.unsqueeze(1)).to(losses.dtype)
            ((losses * mask).sum() / mask.sum()).backward()
            optimizer.step()
    return state(model), []


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn, self.out = nn.Conv1d(4, 8, 3, padding=1), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.rnn(torch.relu(self.conv(x)).transpose(1, 2))
        return self.out(output).log_softmax(2)


@script("speech: `ctc_loss`, time first")
def ctc(team: Any) -> Result:
    torch.manual_seed(0)
    model: Any = Speech()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(noise(20, 4, 12), 1 + whole_numbers(4, 20, 3), 1 + whole_numbers(3, 20, seed=5))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = ported(team, model, optimizer, loader)
    for x, target, lengths in loader:
        optimizer.zero_grad()
        output = model(x).transpose(0, 1)
        F.ctc_loss(output, target, torch.full((len(x),), 12), lengths).backward()
        optimizer.step()
    return state(model), []
