"""Model, data and loops, as in Flower's PyTorch template."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 3)
        self.fc1 = nn.Linear(16 * 2 * 2, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.conv1(x))))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def load_data(partition_id, num_partitions, samples=120):
    """Ten patterns of 3 x 16 x 16 under noise: made here, nothing is downloaded."""
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1 + partition_id)
    labels = torch.randint(10, (samples,), generator=draw)
    images = patterns[labels] + 0.5 * torch.randn(samples, 3, 16, 16, generator=draw)
    train, test = torch.arange(samples).split([samples * 4 // 5, samples - samples * 4 // 5])
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(images[test], labels[test]), batch_size=64),
    )


def train(net, trainloader, epochs, lr, device):
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(trainloader))


def test(net, testloader, device):
    net.to(device).eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += F.cross_entropy(outputs, labels.to(device)).item()
            correct += (outputs.argmax(1) == labels.to(device)).sum().item()
    return loss / len(testloader), correct / len(testloader.dataset)
