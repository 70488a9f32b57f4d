"""Small models of every kind the tests use, and their batches. Batch sizes differ from all other
sizes, but for one that is meant to be equal."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

B = 6


class MLP(nn.Module):
    def __init__(self, width=10, classes=4):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, width),
            nn.ReLU(),
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, classes),
        )

    def forward(self, x):
        return self.layers(x)


class ConvNet(nn.Module):
    def __init__(self, norm=lambda c: nn.GroupNorm(2, c), inplace=True):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            norm(8),
            nn.ReLU(inplace),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False),
            norm(8),
            nn.SiLU(inplace),
            nn.AvgPool2d(2),
        )
        self.head = nn.Linear(8 * 2 * 2, 5)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))
            if stride != 1 or cin != cout
            else None
        )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet-18's shape: four stages of two blocks, 20 batch norms."""

    def __init__(self, width=4, stages=(2, 2, 2, 2), classes=5):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks, cin = [], width
        for i, n in enumerate(stages):
            for j in range(n):
                cout = width * 2**i
                blocks.append(Block(cin, cout, 2 if i > 0 and j == 0 else 1))
                cin = cout
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(cin, classes)

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, layers=2, batch_first=True, bidirectional=False):
        super().__init__()
        self.rnn = kind(5, 7, layers, batch_first=batch_first, bidirectional=bidirectional)
        self.head = nn.Linear(7 * (1 + bidirectional), 4)
        self.batch_first = batch_first

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1] if self.batch_first else out[-1])


class Seq2Seq(nn.Module):
    def __init__(self, dropout=0.0, batch_first=True):
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout, batch_first=batch_first)
        self.head = nn.Linear(8, 5)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.head(self.transformer(source, target, tgt_mask=mask))


class Encoder(nn.Module):
    def __init__(self, dropout=0.0, norm_first=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x, padding=None):
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()

        def double(cin, cout):
            return nn.Sequential(
                nn.Conv2d(cin, cout, 3, padding=1),
                nn.GroupNorm(2, cout),
                nn.SiLU(),
                nn.Conv2d(cout, cout, 3, padding=1),
                nn.GroupNorm(2, cout),
                nn.SiLU(),
            )

        self.down1, self.down2, self.middle = double(3, 4), double(4, 8), double(8, 8)
        self.up2, self.dec2 = nn.ConvTranspose2d(8, 8, 2, 2), double(16, 8)
        self.dec1, self.out = double(12, 4), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.avg_pool2d(b, 2))
        b = self.dec2(torch.cat([self.up2(c), b], 1))
        a = self.dec1(torch.cat([F.interpolate(b, scale_factor=2, mode="nearest"), a], 1))
        return self.out(a)


class Modulated(nn.Module):
    """A convolution whose weights each image scales, as in StyleGAN2: images are groups of one."""

    def __init__(self, c_in, c_out, transposed=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c_out, c_in, 3, 3))
        self.style, self.transposed = nn.Linear(5, c_in), transposed

    def forward(self, x, style):
        b, c, *size = x.shape
        weight = self.weight * self.style(style)[:, None, :, None, None]
        x = x.reshape(1, b * c, *size)
        if self.transposed:
            weight = weight.transpose(1, 2).flatten(0, 1)
            x = F.conv_transpose2d(x, weight, None, 2, groups=b)
        else:
            x = F.conv2d(x, weight.flatten(0, 1), padding=1, groups=b)
        return F.leaky_relu(x.view(b, -1, *x.shape[2:]))


class Generator(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(
            [Modulated(3, width), Modulated(width, width, True), Modulated(width, 3)]
        )

    def forward(self, x, style):
        for layer in self.layers:
            x = layer(x, style)
        return x


def gpt2(dropout=0.0, **kw):
    hf = pytest.importorskip("transformers")

    base = dict(vocab_size=31, n_positions=16, n_embd=12, n_layer=2, n_head=2, use_cache=False)
    base |= dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    base |= dict(bos_token_id=0, eos_token_id=0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**(base | kw)))


LAYERS = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20)


def llama(dropout=0.0, **kw):
    hf = pytest.importorskip("transformers")

    base = LAYERS | dict(vocab_size=31, max_position_embeddings=16, use_cache=False)
    base |= dict(attention_dropout=dropout)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**(base | kw)))


def bert(dropout=0.0, **kw):
    hf = pytest.importorskip("transformers")

    base = LAYERS | dict(vocab_size=29, max_position_embeddings=16, num_labels=3)
    base |= dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return hf.BertForSequenceClassification(hf.BertConfig(**(base | kw)))


def vit(dropout=0.0, **kw):
    hf = pytest.importorskip("transformers")

    base = LAYERS | dict(image_size=8, patch_size=4, num_channels=3, num_labels=5)
    base |= dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return hf.ViTForImageClassification(hf.ViTConfig(**(base | kw)))


def images(b=B, size=8, classes=5, dtype=torch.float64):
    return lambda: (torch.randn(b, 3, size, size, dtype=dtype), torch.randint(0, classes, (b,)))


def rows_of(*shape, b=B, classes=4, dtype=torch.float64):
    return lambda: (torch.randn(b, *shape, dtype=dtype), torch.randint(0, classes, (b,)))


def tokens(b=B, t=9, vocab=31):
    return lambda: (torch.randint(0, vocab, (b, t)),)


def padded(b=B, t=9, vocab=29):
    def make():
        lengths = torch.randint(3, t + 1, (b,))
        mask = (torch.arange(t)[None] < lengths[:, None]).long()
        return torch.randint(1, vocab, (b, t)) * mask, mask, torch.randint(0, 3, (b,))

    return make


def ce(model, x, y):
    return F.cross_entropy(model(x), y)
